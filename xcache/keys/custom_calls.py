"""Find the custom calls of a program that run code outside jaxlib, which the program itself has registered.

While XLA compiles, it asks the registration how the call is partitioned and, on a GPU, whether it can be part of a
command buffer. jaxlib does not expose either, so a key cannot hold it. Loading such an executable also runs the
program's own code, which makes the state of each call.
"""

from __future__ import annotations

import re
from typing import Any

from xcache.keys import stablehlo

# The operation's name, as the strings of MLIR bytecode spell it.
_OPERATION = b"custom_call"
# Names that jaxlib and its plugins register or XLA itself replaces. A missing name costs hits; a name too many may
# crash the program. Compiled when first needed, because it takes longer to compile than all other patterns together.
_OF_JAXLIB = r"""
    # jaxlib's for the processor: LAPACK by type and routine, and a few besides
    lapack_[sdcz][a-z0-9]{4,6}(_ffi)? | blas_[sdcz]trsm
    | tridiagonal_solve_perturbed_ffi | cpu_csr_sparse_dense_ffi | dce_sink
    # ... and for GPUs, by library and routine
    | (cu|hip)solver_(potrf|getrf|geqrf|csrlsvqr|orgqr|ormqr|syevd|syevj|syrk|sytrd)(_ffi)?
    | (cu|hip)solver_(gesvd|gesvdj|gesvdp|gesdd|geev)(_ffi)?
    | (cu|hip)blas_(getrf|geqrf|trsm)_batched(_ffi)?
    | (cu|hip)sparse_(csr|coo)_(todense|fromdense|matvec|matmat)(_ffi)? | (cu|hip)sparse_gtsv2(_ffi|_f32|_f64)
    | (cu|hip|mi)dnn_rnn(_bwd)?(_ffi)? | (cu|hip)hybrid_(geqp3|eig_real|eig_comp)
    | (cu|hip)_(threefry2x32|cholesky_update|lu_pivots_to_permutation|tridiagonal_solve_perturbed)(_ffi)?
    | triton_kernel_call(_ffi)? | mosaic_gpu(_v2)? | tpu_custom_call
    | xla_(ffi_|buffer_)?(partitioned_)?python_(cpu|gpu)_callback
    # XLA's own
    | (SPMD)?Sharding | SPMDFullToShardShape | SPMDShardToFullShape | CustomSPMDPartitioning | InspectSharding
    | xla\.sdy\.\w+ | (stablehlo|mhlo|chlo)\.\w+ | __(cudnn|cublas|cub|cusolver|gpu|onednn|triton|xla)\$.*
    | annotate_device_placement | MoveToHost | MoveToDevice | PinToDevice | PinToDeviceSram | LayoutConstraint
    | AllocateBuffer | CreateBuffer | Pin | Unpin
    | TopK | ApproxTopK | PartialReduce | ragged_all_to_all | shape_assertion
    | AssumeGatherIndicesInBound | SetBound | GetDimensionSize | PadToStatic | SliceToDynamic
    | X64(Combine|SplitLow|SplitHigh)
    | Cholesky | Qr | QrDecomposition | LuDecomposition | Eigh | ProductOfElementaryHouseholderReflectors
"""


def foreign(module: Any, content: bytes) -> str | None:
    """Return the name of a custom call that is not jaxlib's own, or None; ``content`` is ``module``'s bytecode.

    The module is walked only if the bytecode names a custom call.
    """
    if _OPERATION not in content:
        return None
    with module.context:
        for operation in stablehlo.operations(module):
            if _OPERATION.decode() in operation.name and (name := _target(operation)) is not None:
                return name
    return None


def _target(call: Any) -> str | None:
    """Return the name that a call is registered under, unless it is jaxlib's own."""
    from jaxlib.mlir import ir

    attributes = call.attributes
    name = ir.StringAttr(attributes["call_target_name"]).value if "call_target_name" in attributes else "?"
    return None if re.fullmatch(_OF_JAXLIB, name, re.VERBOSE) else name
