// How Python launches a kernel of the simulator, and what CUDA C++ calls its parts; included by hostsim.hpp.

#define HOSTSIM_KERNEL(name) \
  static const bool hostsim_##name = hostsim::add(#name, [](void** arguments) { hostsim::call(name, arguments); });

// arguments[i] points to argument i, as for cuLaunchKernel. Returns null, or an error message.
extern "C" __attribute__((visibility("default"))) inline const char* __attribute__((used)) hostsim_launch(
    const char* name, const unsigned* grid, const unsigned* dim, void** arguments, int order, unsigned resident) {
  using namespace hostsim;
  Entry kernel = nullptr;
  for (unsigned i = 0; i < kernel_count; i++)
    if (!strcmp(kernels[i].name, name)) kernel = kernels[i].entry;
  const uint64_t threads = uint64_t(dim[0]) * dim[1] * dim[2];
  if (!kernel) return "no kernel of that name";
  if (!threads || threads > MAX_THREADS) return "a block has 1 to 1024 threads";
  if (!resident || resident > MAX_RESIDENT) return "1 to 8 blocks can be in flight";
  if (!(uint64_t(grid[0]) * grid[1] * grid[2])) return "an empty grid";
  const uint64_t seed = uint64_t(order) * 0x9E3779B97F4A7C15ull + 1;
  launch = {{grid[0], grid[1], grid[2]}, {dim[0], dim[1], dim[2]}, arguments, kernel, order, seed};
  static char alternate[64 * 1024];
  const int numbers[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};
  struct sigaction ours = {}, before[5];
  stack_t stack = {}, stack_before;
  stack.ss_sp = alternate, stack.ss_size = sizeof alternate;
  sigaltstack(&stack, &stack_before);
  ours.sa_sigaction = on_signal;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < 5; i++) sigaction(numbers[i], &ours, &before[i]);
  const char* result = nullptr;
  block = nullptr, self = nullptr;
  if (sigsetjmp(failure, 1)) {
    result = message;
    abandon();
  } else {
    find_shared();
    prepare(resident);
    run(resident);
  }
  for (int i = 0; i < 5; i++) sigaction(numbers[i], &before[i], nullptr);
  sigaltstack(&stack_before, nullptr);
  return result;
}

// ---- CUDA's names --------------------------------------------------------------------------------------------------

#define threadIdx (hostsim::self->thread)
#define blockIdx (hostsim::block->index)
#define blockDim (hostsim::launch.dim)
#define gridDim (hostsim::launch.grid)
#define HOSTSIM_HERE hostsim::Place here = hostsim::Place::current()

inline void __syncthreads(HOSTSIM_HERE) { hostsim::barrier(false, here); }
inline int __syncthreads_or(int x, HOSTSIM_HERE) { return hostsim::barrier(x, here); }
inline void __syncwarp(unsigned mask = ~0u, HOSTSIM_HERE) {
  hostsim::meet(mask, 0, here, [](const uint64_t*, unsigned, unsigned) { return 0; });
}
inline unsigned __ballot_sync(unsigned mask, int x, HOSTSIM_HERE) {
  return hostsim::meet(mask, x != 0, here, [](const uint64_t* v, unsigned m, unsigned) {
    unsigned r = 0;
    for (unsigned l = 0; l < 32; l++)
      if (m >> l & 1) r |= unsigned(v[l]) << l;
    return r;
  });
}
template <class T>
T __shfl_sync(unsigned mask, T x, int source, HOSTSIM_HERE) {
  return hostsim::shuffle(mask, x, source & 31, here);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int bits, HOSTSIM_HERE) {
  return hostsim::shuffle(mask, x, int(hostsim::self->lane) ^ bits, here);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned step, HOSTSIM_HERE) {
  return hostsim::shuffle(mask, x, int(hostsim::self->lane) - int(step), here);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
#define __ldg(p) (*(p))
#define __ldcg(p) (*(p))
#define __ldcs(p) (*(p))
inline void __threadfence() { hostsim::maybe_yield(); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned u) { return std::bit_cast<float>(u); }
inline float __expf(float x) { return std::exp(x); }

// There is one OS thread, so every operation is atomic. In random order, other threads may run first.
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> x) {
  hostsim::maybe_yield();
  const T old = *p;
  *p = T(old + x);
  return old;
}
