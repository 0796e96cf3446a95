"""The part that the client and the daemon share: messages, frames, envelopes and ownership checks."""
