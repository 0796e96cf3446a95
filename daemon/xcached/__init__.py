"""The daemon of xcache."""
