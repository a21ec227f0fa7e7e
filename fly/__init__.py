"""fly: a kernel compiler in Python for AMD and NVIDIA GPUs.

Names are loaded on first use: `import fly` alone loads neither MLIR, torch nor a driver.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS: dict[str, str] = {
    name: module
    for module, names in {
        "fly.layout": "Layout Swizzle ComposedLayout",
        "fly.ir.dtypes": "i1 i8 i16 i32 i64 f16 bf16 f32 f64 f8e4m3 f8e5m2 f8e4m3fnuz DType",
        "fly.ir.value": "Value select concat broadcast from_elements compare",
        "fly.ir.math": "exp2 exp log2 tanh rcp sqrt rsqrt fma maximum minimum absolute floor ceil trunc round"
        " ceil_div divide_unsigned mul_wide reduce_max reduce_sum",
        "fly.ir.elementary": "log sin cos erf pow",
        "fly.ir.autodiff": "Tape Gradients LoadGradient",
        "fly.ir.memory": "Pointer alloc_shared store load_bounded store_bounded",
        "fly.ir.atomics": "atomic_add atomic_add_bounded fetch_add fetch_wrap load_acquire",
        "fly.ir.control": "range while_ when cond",
        "fly.lang.kernel": "kernel Kernel Operand occupancy compiler_options flush_denormals narrow_splats",
        "fly.lang.tensor": "Tensor Tile RowView Panel Window",
        "fly.lang.paged": "PagedRows",
        "fly.lang.shared": "SharedMemory SharedTile SwizzledTile PaddedTile",
        "fly.lang.fragment": "AccumulatorLayout Fragment RowVector ColumnVector",
        "fly.lang.lanes": "evaluate lane_map linear_layout",
        "fly.lang.atoms": "MmaAtom MatrixLoad",
        "fly.lang.operand": "OperandLoader OperandPlan plan_operand operand_coordinates require_plan mma",
        "fly.lang.chain": "Chain chain",
        "fly.lang.stored_operand": "StoredOperand FragmentStore plan_stored_operand",
        "fly.lang.copy": "RowCopy TransposedCopy TileRing AlternatingTiles",
        "fly.lang.vector_copy": "SharedVector VectorCopy",
        "fly.lang.direct_copy": "DirectCopy CopyPosition PagedDirectCopy PagePosition",
        "fly.lang.software_pipeline": "Pipeline PipelineTile Stage",
        "fly.lang.sync": "Token barrier wait join shuffle shuffle_xor any_lane lane_sum lane_max reduce_lanes"
        " sched_barrier set_priority",
        "fly.lang.ids": "block_id thread_id grid_dim block_dim lane_id lane_of wave_id wave_size first_lane"
        " reread remade early reread_ids target",
        "fly.lang.debug": "print check",
        "fly.lang.signature": "TensorSpec ScalarSpec TensorMapSpec",
        "fly.backends.artefact": "Artefact",
        "fly.runtime.exported": "load",
        "fly.runtime.compile": "compile",
        "fly.runtime.tune": "tune Tuned",
        "fly.runtime.tuned_results": "export_tuned import_tuned",
        "fly.lang.tensor_map": "TensorMap",
        "fly.runtime.tensor_map": "tensor_map",
    }.items()
    for name in names.split()
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'fly' has no attribute {name!r}")
    from fly.errors import needs_packages

    with needs_packages(f"fly.{name}"):
        module = importlib.import_module(_EXPORTS[name].removeprefix("fly"), __name__)
    if _EXPORTS[name] == "fly.lang.kernel":
        module.launch = _launch
    value = getattr(module, name)
    globals()[name] = value
    return value


def _launch(*args: Any) -> None:
    """What `kernel[grid, block](...)` calls: the runtime, with the compiler behind it."""
    from fly.runtime.compile import compile_to_launch
    from fly.runtime.launch import launch

    launch(*args, compile_to_launch)


def __dir__() -> list[str]:
    return sorted(__all__)
