"""What `import fly` gives, for type checkers: `_EXPORTS` of `__init__.py`, which a test compares with it."""

# fmt: off
from fly.layout import Layout as Layout, Swizzle as Swizzle, ComposedLayout as ComposedLayout
from fly.ir.dtypes import (
    i1 as i1, i8 as i8, i16 as i16, i32 as i32, i64 as i64, f16 as f16, bf16 as bf16, f32 as f32, f64 as f64,
    f8e4m3 as f8e4m3, f8e5m2 as f8e5m2, f8e4m3fnuz as f8e4m3fnuz, DType as DType,
)
from fly.ir.value import (
    Value as Value, select as select, concat as concat, broadcast as broadcast, from_elements as from_elements,
    compare as compare,
)
from fly.ir.math import (
    exp2 as exp2, exp as exp, log2 as log2, tanh as tanh, rcp as rcp, sqrt as sqrt, rsqrt as rsqrt, fma as fma,
    maximum as maximum, minimum as minimum, absolute as absolute, floor as floor, ceil as ceil, trunc as trunc,
    round as round, ceil_div as ceil_div, divide_unsigned as divide_unsigned, mul_wide as mul_wide,
    reduce_max as reduce_max, reduce_sum as reduce_sum,
)
from fly.ir.elementary import log as log, sin as sin, cos as cos, erf as erf, pow as pow
from fly.ir.autodiff import Tape as Tape, Gradients as Gradients, LoadGradient as LoadGradient
from fly.ir.memory import (
    Pointer as Pointer, alloc_shared as alloc_shared, store as store, load_bounded as load_bounded,
    store_bounded as store_bounded,
)
from fly.ir.atomics import (
    atomic_add as atomic_add, atomic_add_bounded as atomic_add_bounded, fetch_add as fetch_add,
    fetch_wrap as fetch_wrap, load_acquire as load_acquire,
)
from fly.ir.control import range as range, while_ as while_, when as when, cond as cond
from fly.lang.kernel import (
    kernel as kernel, Kernel as Kernel, Operand as Operand, occupancy as occupancy,
    compiler_options as compiler_options, flush_denormals as flush_denormals, narrow_splats as narrow_splats,
)
from fly.lang.tensor import Tensor as Tensor, Tile as Tile, RowView as RowView, Panel as Panel, Window as Window
from fly.lang.paged import PagedRows as PagedRows
from fly.lang.shared import (
    SharedMemory as SharedMemory, SharedTile as SharedTile, SwizzledTile as SwizzledTile,
    PaddedTile as PaddedTile,
)
from fly.lang.fragment import (
    AccumulatorLayout as AccumulatorLayout, Fragment as Fragment, RowVector as RowVector,
    ColumnVector as ColumnVector,
)
from fly.lang.lanes import evaluate as evaluate, lane_map as lane_map, linear_layout as linear_layout
from fly.lang.atoms import MmaAtom as MmaAtom, MatrixLoad as MatrixLoad
from fly.lang.operand import (
    OperandLoader as OperandLoader, OperandPlan as OperandPlan, plan_operand as plan_operand,
    operand_coordinates as operand_coordinates, require_plan as require_plan, mma as mma,
)
from fly.lang.chain import Chain as Chain, chain as chain
from fly.lang.stored_operand import (
    StoredOperand as StoredOperand, FragmentStore as FragmentStore, plan_stored_operand as plan_stored_operand,
)
from fly.lang.copy import (
    RowCopy as RowCopy, TransposedCopy as TransposedCopy, TileRing as TileRing,
    AlternatingTiles as AlternatingTiles,
)
from fly.lang.vector_copy import SharedVector as SharedVector, VectorCopy as VectorCopy
from fly.lang.direct_copy import (
    DirectCopy as DirectCopy, CopyPosition as CopyPosition, PagedDirectCopy as PagedDirectCopy,
    PagePosition as PagePosition,
)
from fly.lang.software_pipeline import Pipeline as Pipeline, PipelineTile as PipelineTile, Stage as Stage
from fly.lang.sync import (
    Token as Token, barrier as barrier, wait as wait, join as join, shuffle as shuffle,
    shuffle_xor as shuffle_xor, any_lane as any_lane, lane_sum as lane_sum, lane_max as lane_max,
    reduce_lanes as reduce_lanes, sched_barrier as sched_barrier, set_priority as set_priority,
)
from fly.lang.ids import (
    block_id as block_id, thread_id as thread_id, grid_dim as grid_dim, block_dim as block_dim,
    lane_id as lane_id, lane_of as lane_of, wave_id as wave_id, wave_size as wave_size, first_lane as first_lane,
    remade as remade, early as early, reread as reread, reread_ids as reread_ids, target as target,
)
from fly.lang.debug import print as print, check as check
from fly.lang.signature import TensorSpec as TensorSpec, ScalarSpec as ScalarSpec, TensorMapSpec as TensorMapSpec
from fly.backends.artefact import Artefact as Artefact
from fly.runtime.exported import load as load
from fly.runtime.compile import compile as compile
from fly.runtime.tune import tune as tune, Tuned as Tuned
from fly.runtime.tuned_results import export_tuned as export_tuned, import_tuned as import_tuned
from fly.lang.tensor_map import TensorMap as TensorMap
from fly.runtime.tensor_map import tensor_map as tensor_map

__version__: str
