"""The launcher on an NVIDIA GPU, with a kernel written by hand in PTX."""

import threading

import pytest
import torch

from fly.backends.artefact import Artefact
from fly.errors import ArgumentError, CompileError, LaunchError
from fly.runtime.cuda import CudaDevice
from fly.runtime.launch import launch
from fly.runtime.prepared import bind

from .fakes import Kernel, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip), reason="no NVIDIA GPU"),
]

# c[i] = a[i] + b[i], f32; the parameters are what three tensors of rank 1 flatten to
ADD = """
.version 7.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 unused[];
.visible .entry add(
  .param .u64 a, .param .u32 an, .param .u64 b, .param .u32 bn, .param .u64 c, .param .u32 cn
)
{
  .reg .pred %p;
  .reg .b32 %i, %n, %t, %w;
  .reg .b64 %a, %b, %c, %o;
  .reg .f32 %x, %y;
  mov.u32 %i, %ctaid.x;
  mov.u32 %w, %ntid.x;
  mov.u32 %t, %tid.x;
  mad.lo.u32 %i, %i, %w, %t;
  ld.param.u32 %n, [cn];
  setp.ge.u32 %p, %i, %n;
  @%p bra DONE;
  ld.param.u64 %a, [a];
  ld.param.u64 %b, [b];
  ld.param.u64 %c, [c];
  mul.wide.u32 %o, %i, 4;
  add.u64 %a, %a, %o;
  add.u64 %b, %b, %o;
  add.u64 %c, %c, %o;
  ld.global.f32 %x, [%a];
  ld.global.f32 %y, [%b];
  add.f32 %x, %x, %y;
  st.global.f32 [%c], %x;
DONE:
  ret;
}
"""
N = 1000


class Compiler:
    """A `Compile` that always answers with the PTX above."""

    def __init__(self, source: str = ADD, shared: int = 0):
        self.source, self.shared = source, shared

    def __call__(self, kernel, specs, statics, target, block) -> Artefact:
        fields = kernel.signature.flatten(specs)
        return Artefact("add", target, self.source.encode(), self.source, fields, block, self.shared)


@pytest.fixture
def kernel() -> Kernel:
    return Kernel(*tensors("a", "b", "c"), name="add")


def operands(device="cuda"):
    return [torch.randn(N, device=device) for _ in range(2)] + [torch.zeros(N, device=device)]


def run(kernel, operands, stream=None, compiler=None):
    launch(kernel, (N + 127) // 128, 128, operands, {}, stream, compiler or Compiler())


def test_it_runs_on_the_current_stream(kernel):
    a, b, c = operands()
    for _ in range(3):  # cold and warm
        c.zero_()
        run(kernel, (a, b, c))
        torch.testing.assert_close(c, a + b, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["current", "object", "handle"])
def test_it_runs_on_another_stream(kernel, how):
    a, b, c = operands()
    run(kernel, operands())
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # on the wrong stream, the kernel would read `a` too early
        a.fill_(2)
    if how == "current":
        with torch.cuda.stream(stream):
            run(kernel, (a, b, c))
    else:
        run(kernel, (a, b, c), stream if how == "object" else stream.cuda_stream)
    stream.synchronize()
    torch.testing.assert_close(c, 2 + b, rtol=0, atol=0)


def test_it_runs_from_a_new_thread(kernel):
    a, b, c = operands()
    torch.cuda.synchronize()
    thread = threading.Thread(target=run, args=(kernel, (a, b, c)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    torch.testing.assert_close(c, a + b, rtol=0, atol=0)


def test_it_can_be_captured_in_a_graph(kernel):
    a, b, c = operands()
    run(kernel, (a, b, c))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(kernel, (a, b, c))
    a.fill_(3)
    graph.replay()
    torch.testing.assert_close(c, 3 + b, rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_it_runs_on_a_device_that_is_not_current(kernel):
    for device in ("cuda:1", "cuda:0"):
        a, b, c = operands(device)
        run(kernel, (a, b, c))
        torch.testing.assert_close(c, a + b, rtol=0, atol=0)
    assert torch.cuda.current_device() == 0


def test_a_prepared_launch_takes_new_addresses(kernel):
    prepared = bind(kernel, (N + 127) // 128, 128, operands(), {}, Compiler())
    a, b, c = operands()
    prepared(a.data_ptr(), b.data_ptr(), c.data_ptr())
    torch.testing.assert_close(c, a + b, rtol=0, atol=0)


def test_shared_memory_beyond_48_kib(kernel):
    a, b, c = operands()
    run(kernel, (a, b, c), compiler=Compiler(shared=96 * 1024))
    torch.testing.assert_close(c, a + b, rtol=0, atol=0)


def test_too_much_shared_memory_is_named(kernel):
    with pytest.raises(LaunchError, match="shared memory bytes: 1048576"):
        run(kernel, operands(), compiler=Compiler(shared=1 << 20))


def test_the_drivers_log_is_in_the_error(kernel):
    with pytest.raises(CompileError, match=r"CUDA_ERROR_INVALID_PTX[\s\S]*\.f99"):
        run(kernel, operands(), compiler=Compiler(ADD.replace("add.f32", "add.f99")))


def test_tensors_on_the_gpu_and_the_cpu(kernel):
    a, b, c = operands()
    with pytest.raises(ArgumentError, match="'a' is on cuda:0, argument 'b' on cpu"):
        run(kernel, (a, b.cpu(), c))


def test_what_the_driver_says_it_uses():
    artefact = Artefact("add", "sm_80", ADD.encode(), ADD, (), (128, 1, 1))
    assert CudaDevice(0).load(artefact).resources.registers > 0
    assert torch.zeros(1, device="cuda").item() == 0  # torch works on as before
