"""Values to try for each option of jax's configuration, which differ from one version of jax to the next."""

from __future__ import annotations

import enum
from typing import Any

import jax

# The options that are not tried, and the reasons.
NOT_TRIED = {
    "jax_platforms": "each process is given it, lest it look for devices",
    "jax_mtls_ca_file": "names a file for talking to other hosts",
    "jax_mtls_cert_file": "names a file for talking to other hosts",
    "jax_mtls_key_file": "names a file for talking to other hosts",
    "jax_mtls_peer_uri_prefix": "for talking to other hosts",
}
# No type says what a text may be. Files are written to the child's own folder.
_TEXTS = {
    "jax_backend_target": ("local",),
    "jax_compilation_cache_dir": ("jax-cache",),
    "jax_cross_host_transfer_socket_address": ("127.0.0.1:0",),
    "jax_cross_host_transport_addresses": ("127.0.0.1:0",),
    "jax_cuda_visible_devices": ("0",),
    "jax_debug_log_modules": ("jax._src.compiler",),
    "jax_default_device": ("cpu",),
    "jax_dump_ir_modes": ("jaxpr",),
    "jax_dump_ir_to": ("dumped",),
    "jax_hlo_source_file_canonicalization_regex": (".*",),
    "jax_include_debug_info_in_dumps": ("False",),
    "jax_mock_gpu_topology": ("1x1x1",),
    "jax_oneapi_visible_devices": ("0",),
    "jax_persistent_cache_enable_xla_caches": ("all", "none"),
    "jax_pjrt_client_create_options": ("option:1",),
    "jax_platform_name": ("cpu",),
    "jax_rocm_visible_devices": ("0",),
    "jax_source_url_schema": ("http://localhost/{file}",),
    "jax_xla_backend": ("cpu",),
}
# The next number would not do.
_NUMBERS = {
    "jax_export_calling_convention_version": (9, 10),
    "jax_num_cpu_devices": (2,),
}
# Efforts go from -1 to 1.
_FLOATS = (-1.0, 0.0, 0.5, 1.0)


def options() -> dict[str, tuple[Any, ...]]:
    """Return all options but those not tried; for each, the values to try. An enum's value is its name."""
    found = {}
    for name, value in sorted(jax.config.values.items()):
        if name not in NOT_TRIED:
            kind, _, described = jax.config.meta[name]
            found[name] = tuple(other for other in _values(name, kind, described, value) if other != _plain(value))
    return found


def update(name: str, value: Any) -> None:
    """Set an option to a value that ``options`` returned."""
    usual = jax.config.values[name]
    jax.config.update(name, type(usual)[value] if isinstance(usual, enum.Enum) else value)


def _values(name: str, kind: Any, described: dict[str, Any], value: Any) -> tuple[Any, ...]:
    if kind is str:
        return _TEXTS.get(name, ())
    if name in _NUMBERS:
        return _NUMBERS[name]
    if kind == "enum":
        return tuple(described["enum_values"])
    if kind == "enum_class":
        return tuple(member.name for member in described["enum_class"])
    if kind is int:
        return ((value or 0) + 1,)
    return {bool: (False, True), float: _FLOATS}.get(kind, ())


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, enum.Enum) else value
