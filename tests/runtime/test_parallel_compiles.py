"""First compiles of a process by several threads at once, and in children that are forked while a thread compiles."""

import os
import subprocess
import sys

import pytest

KERNELS = """
import os, sys, threading
import fly

sys.setswitchinterval(1e-6)
def kernel(number):
    def body(x: fly.Tensor, y: fly.Tensor):
        value = x.load(fly.thread_id.x)
        for _ in range(20):
            value = value * float(number) + 1.0
        y.store(value, fly.thread_id.x)
    return fly.kernel(body)

def build(number):
    spec = fly.TensorSpec("f32", 1, 16, True)
    assert fly.compile(kernel(number), spec, spec, block=64, target="sm_90a").isa
"""
THREADS = """
barrier, failed = threading.Barrier(4), []
def work(number):
    barrier.wait()
    try:
        build(number)
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failed, failed
"""
FORKS = """
import signal, time
build(0)
stop = threading.Event()
def work():
    number = 1
    while not stop.is_set():
        build(number)
        number += 1
thread = threading.Thread(target=work)
thread.start()
for number in range(12):
    time.sleep(0.003 * number)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        build(-number)
        os._exit(0)
    if failed := os.waitpid(child, 0)[1]:
        break
stop.set()
thread.join()
assert not failed, failed
"""


@pytest.mark.parametrize("program", [THREADS, FORKS], ids=["threads", "forks"])
def test_several_may_compile_at_once(program, tmp_path):
    environment = {**os.environ, "FLY_CACHE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    path = tmp_path / "program.py"  # kernels are traced from a file
    path.write_text(KERNELS + program)
    done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
