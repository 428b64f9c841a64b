"""What reaches the CUDA driver, recorded by a replacement for libcuda."""

import os
import subprocess
import sys

import pytest
from hostsim import compiler

pytest.importorskip("torch", reason="torch is an optional extra of hashcore")
pytest.importorskip("cuda.core", reason="cuda-core comes with the extra hashcore[cuda]")
if compiler() is None and os.environ.get("CI") != "true":
    pytest.skip("g++ is needed to build a stand-in for the driver", allow_module_level=True)
if sys.platform != "linux":
    pytest.skip("the driver's place is looked up as on Linux", allow_module_level=True)

DRIVER = r"""
#include <cstdint>
#include <cstdio>
#include <cstring>
using P = void*;
extern "C" {
int cuCtxGetCurrent(P* c) { *c = nullptr; return 0; }
int cuCtxSetCurrent(P c) { printf("context %p\n", c); return 0; }
int cuDeviceGet(int* d, int index) { *d = index; return 0; }
int cuDevicePrimaryCtxRetain(P* c, int) { *c = P(0x77); return 0; }
int cuLibraryLoadData(P* l, const char* code, P, P, unsigned, P, P, unsigned) {
  *l = P(0x11);
  printf("load %.3s\n", code + 1);
  return 0;
}
int cuLibraryGetKernel(P* k, P, const char* name) { *k = P(0x22); printf("kernel %s\n", name); return 0; }
int cuKernelGetFunction(P* f, P) { *f = P(0x33); return 0; }
static void show(P* a) { printf("arguments %p %p %lld\n", *(P*)a[0], *(P*)a[1], *(long long*)a[2]); }
int cuLaunchKernel(P f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   P stream, P* a, P* extra) {
  printf("launch %p %u %u %u, %u %u %u, %u %p %p\n", f, x, y, z, bx, by, bz, shared, stream, P(extra));
  show(a);
  return y == 99 ? 701 : 0;
}
struct Attribute { int id; char pad[4]; int value; char rest[60]; };
struct Config { unsigned x, y, z, bx, by, bz, shared; P stream; Attribute* attributes; unsigned count; };
int cuLaunchKernelEx(const Config* c, P f, P* a, P*) {
  printf("launch %p %u %u %u, %u %u %u, ", f, c->x, c->y, c->z, c->bx, c->by, c->bz);
  const Attribute& a0 = c->attributes[0];
  printf("%u %p with %u: %d = %d\n", c->shared, c->stream, c->count, a0.id, a0.value);
  show(a);
  return 0;
}
int cuGetErrorName(int, const char** s) { *s = "CUDA_ERROR_NAME"; return 0; }
int cuGetErrorString(int, const char** s) { *s = "its words"; return 0; }
int cuGetProcAddress_v2(const char* name, P* p, int, uint64_t, int*) {
  *p = nullptr;
  setvbuf(stdout, nullptr, _IONBF, 0);  // in turn with Python's own lines
#define ENTRY(f) if (!strcmp(name, #f)) *p = P(f);
  ENTRY(cuCtxGetCurrent) ENTRY(cuCtxSetCurrent) ENTRY(cuDeviceGet) ENTRY(cuDevicePrimaryCtxRetain)
  ENTRY(cuLibraryLoadData) ENTRY(cuLibraryGetKernel) ENTRY(cuKernelGetFunction)
  ENTRY(cuLaunchKernel) ENTRY(cuLaunchKernelEx) ENTRY(cuGetErrorName) ENTRY(cuGetErrorString)
  if (!strcmp(name, "cuGetProcAddress")) *p = P(cuGetProcAddress_v2);
  return *p ? 0 : 500;
}
}
"""

CALLS = """
import contextlib
import torch
from hashcore.cuda import kernels, launch

capturing = False
torch.cuda.device = contextlib.nullcontext
torch._C._cuda_getDevice = lambda: 0
torch._C._cuda_getCurrentRawStream = lambda index: 0x5555
torch.cuda.get_device_capability = lambda index: (9, 0)
torch.cuda.is_current_stream_capturing = lambda: capturing
one, device = kernels.pack("f32", 0x1000, 0x2000, 12345), torch.device("cuda:0")
launch.run([one, one._replace(programmatic=True)], device)
launch._starts_early.cache_clear()
torch.cuda.get_device_capability = lambda index: (8, 0)
launch.run([one._replace(programmatic=True)], device)
torch.cuda.get_device_capability = lambda index: (9, 0)
launch.run((kernels.pack("f32", 0x3000 + i, 0x4000 + i, i) for i in range(3)), device)  # none is kept by the caller
for broken in (one._replace(grid=(1, 99)), one._replace(source="planes.cu")):
    capturing = broken.source == "planes.cu"
    try:
        launch.run([one] * capturing + [broken], device)  # the first is loaded and could go, the second cannot
    except RuntimeError as error:
        print(error)
"""

EXPECTED = """context 0x77
load ELF
kernel pack_f32
launch 0x33 49 1 1, 256 1 1, 0 0x5555 (nil)
arguments 0x1000 0x2000 12345
launch 0x33 49 1 1, 256 1 1, 0 0x5555 with 1: 6 = 1
arguments 0x1000 0x2000 12345
launch 0x33 49 1 1, 256 1 1, 0 0x5555 (nil)
arguments 0x1000 0x2000 12345
launch 0x33 0 1 1, 256 1 1, 0 0x5555 (nil)
arguments 0x3000 0x4000 0
launch 0x33 1 1 1, 256 1 1, 0 0x5555 (nil)
arguments 0x3001 0x4001 1
launch 0x33 1 1 1, 256 1 1, 0 0x5555 (nil)
arguments 0x3002 0x4002 2
launch 0x33 1 99 1, 256 1 1, 0 0x5555 (nil)
arguments 0x1000 0x2000 12345
the CUDA driver reports CUDA_ERROR_NAME: its words
planes.cu cannot be loaded while a CUDA graph is captured; run it once before
"""


@pytest.mark.slow
def test_launches_reach_the_driver_as_they_are_described(tmp_path):
    (tmp_path / "driver.cc").write_text(DRIVER)
    command = [
        str(compiler()),
        "-shared",
        "-fPIC",
        "-w",
        str(tmp_path / "driver.cc"),
        "-o",
        str(tmp_path / "libcuda.so.1"),
    ]
    subprocess.run(command, check=True)
    environment = os.environ | {
        "HASHCORE_CACHE": str(tmp_path),
        "LD_LIBRARY_PATH": str(tmp_path),
        "PYTHONUNBUFFERED": "1",
    }
    for name in ("pack.cu", "planes.cu"):  # compiled beforehand: the compiler would ask this driver for more
        compiled = f"from hashcore.cuda.program import Program; Program({name!r}).cubin('sm_90a')"
        subprocess.run([sys.executable, "-c", compiled], check=True, env=environment | {"LD_LIBRARY_PATH": ""})
    done = subprocess.run([sys.executable, "-c", CALLS], env=environment, capture_output=True, text=True)
    assert done.stdout == EXPECTED, done.stderr
