// Runs CUDA C++ kernels on the CPU, for tests: a fiber per CUDA thread, all in one OS thread.
//
// Purpose: to compare the same .cu files that NVRTC compiles with a reference, without a GPU, and in thread orders that
// a GPU may never produce. Fibers switch only at synchronisation points (barriers, warp operations) and, in random
// order, at atomics. Between two such points, the thread order decides who runs first: ascending, descending, or random
// by a seed. Several blocks are in flight and take turns, each with its own shared memory, poisoned before it starts.
//
// Reported errors: barriers that not all threads reach, or that they reach at different places; warp operations whose
// lanes use different masks, are at different places or have ended; accesses to a guard page; undefined behaviour
// (misaligned vectors, bad shifts), if the source is compiled with trapping UBSan.
// Not detected: effects of weak memory order, and data races between plain accesses in one interval.
//
// Use: #include this, then the kernels inside an anonymous namespace, then HOSTSIM_KERNEL(name) for each kernel.
#pragma once

#include <link.h>
#include <bit>
#include <csetjmp>
#include <csignal>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <source_location>
#include <sys/mman.h>
#include <type_traits>
#include <ucontext.h>
#include <unistd.h>

#define HOSTSIM 1
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// Shared memory is thread-local storage, swapped when another block runs. ("used": else the compiler may
// conclude from setjmp's declaration that no other fiber writes the variable.)
#define __shared__ static thread_local __attribute__((used))

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };

namespace hostsim {

using Place = std::source_location;
using Entry = void (*)(void** arguments);

constexpr unsigned MAX_THREADS = 1024, MAX_RESIDENT = 8, MAX_WARPS = MAX_THREADS / 32, MEETINGS = 64;
constexpr size_t STACK = 64 * 1024;
constexpr uint64_t CANARY = 0x9E3779B97F4A7C15;  // at each stack's far end; guard pages would be too many mappings
constexpr unsigned char POISON = 0xA5;

// A warp operation in progress: the lanes of one mask, at one place in the code.
struct Meeting {
  unsigned mask = 0, arrived = 0, left = 0;
  Place place;
  uint64_t value[32];
  bool complete() const { return mask && arrived == mask; }
};

enum class State { runnable, barrier, warp, ended };

struct Fiber {
  jmp_buf saved;
  ucontext_t fresh;
  char* stack = nullptr;
  bool started = false;
  State state = State::ended;
  uint3 thread;
  unsigned lane, warp;
  Place place;
  Meeting* meeting = nullptr;
};

struct Block {
  bool live = false;
  uint3 index;
  Fiber fibers[MAX_THREADS];
  Meeting meetings[MAX_WARPS][MEETINGS];
  unsigned waiting = 0, ended = 0;
  bool vote = false, verdict = false;  // of the barrier in progress, and of the last one
  char* shared = nullptr;
};

struct Launch {
  dim3 grid, dim;
  void** arguments = nullptr;
  Entry entry = nullptr;
  int order = 0;  // 0 ascending, 1 descending, otherwise the seed of a random order
  uint64_t random = 0;
};

inline Block* blocks[MAX_RESIDENT] = {};
inline Block* block = nullptr;  // the running block
inline Fiber* self = nullptr;
inline Launch launch;
inline char* stacks = nullptr;
inline jmp_buf scheduler;
inline sigjmp_buf failure;
inline char message[512];

struct Kernel { const char* name; Entry entry; };
inline Kernel kernels[64];
inline unsigned kernel_count = 0;

inline uint64_t draw() {
  launch.random ^= launch.random << 13, launch.random ^= launch.random >> 7, launch.random ^= launch.random << 17;
  return launch.random;
}

inline char* shared_begin = nullptr;
inline size_t shared_size = 0;

[[noreturn]] inline void fail(const char* format, ...) {
  va_list list;
  va_start(list, format);
  const int used = vsnprintf(message, sizeof message, format, list);
  va_end(list);
  if (block && self && used >= 0 && size_t(used) < sizeof message)
    snprintf(message + used, sizeof message - used, "; block (%u, %u, %u), thread (%u, %u, %u)", block->index.x,
             block->index.y, block->index.z, self->thread.x, self->thread.y, self->thread.z);
  siglongjmp(failure, 1);
}

// Finds this library's thread-local storage: all __shared__ variables, and one byte of ours so that it always exists.
inline void find_shared() {
  static thread_local volatile char anchor;
  anchor = 0;
  const auto look = [](dl_phdr_info* library, size_t, void* inside) {
    bool ours = false;
    size_t size = 0;
    for (int i = 0; i < library->dlpi_phnum; i++) {
      const auto& part = library->dlpi_phdr[i];
      const uintptr_t start = library->dlpi_addr + part.p_vaddr, at = reinterpret_cast<uintptr_t>(inside);
      ours |= part.p_type == PT_LOAD && at >= start && at < start + part.p_memsz;
      if (part.p_type == PT_TLS) size = part.p_memsz;
    }
    if (ours) shared_begin = static_cast<char*>(library->dlpi_tls_data), shared_size = size;
    return int(ours);
  };
  dl_iterate_phdr(look, reinterpret_cast<void*>(&find_shared));
  if (!shared_begin) fail("the library's thread-local storage was not found");
}

inline void on_signal(int number, siginfo_t* info, void*) {
  if (number == SIGSEGV || number == SIGBUS) fail("access outside every buffer, at %p", info->si_addr);
  fail(number == SIGFPE ? "integer division by zero" : "undefined behaviour (misaligned access, shift or overflow)");
}

// ---- Fibers --------------------------------------------------------------------------------------------------------

inline void leave() {
  if (!_setjmp(self->saved)) _longjmp(scheduler, 1);
}

inline void fiber_main() {
  for (;;) {  // later blocks reuse the fiber
    launch.entry(launch.arguments);
    self->state = State::ended;
    block->ended++;
    leave();
  }
}

inline void resume(Fiber& fiber, unsigned slot, unsigned thread) {
  self = &fiber;
  if (_setjmp(scheduler)) {
    if (memcmp(self->stack, &CANARY, sizeof CANARY)) fail("a thread needs more than %zu bytes of stack", STACK);
    return;
  }
  if (fiber.started) _longjmp(fiber.saved, 1);
  fiber.started = true;
  getcontext(&fiber.fresh);
  fiber.fresh.uc_stack.ss_sp = fiber.stack = stacks + (slot * MAX_THREADS + thread) * STACK;
  memcpy(fiber.stack, &CANARY, sizeof CANARY);
  fiber.fresh.uc_stack.ss_size = STACK;
  fiber.fresh.uc_link = nullptr;
  makecontext(&fiber.fresh, fiber_main, 0);
  setcontext(&fiber.fresh);
}

inline void wait_while(State state) {
  self->state = state;
  while (self->state == state) leave();
}

inline void maybe_yield() {
  if (launch.order > 1 && draw() % 4 == 0) leave();
}

inline bool same(const Place& a, const Place& b) {
  return a.line() == b.line() && a.column() == b.column() && !strcmp(a.file_name(), b.file_name());
}

// ---- Barriers ------------------------------------------------------------------------------------------------------

// Returns whether any thread of the block votes.
inline bool barrier(bool vote, Place place) {
  const unsigned threads = launch.dim.x * launch.dim.y * launch.dim.z;
  if (block->ended) fail("__syncthreads at line %u after %u threads of the block ended", place.line(), block->ended);
  for (unsigned t = 0; block->waiting && t < threads; t++)
    if (block->fibers[t].state == State::barrier && !same(block->fibers[t].place, place))
      fail("threads wait at different barriers, lines %u and %u", block->fibers[t].place.line(), place.line());
  self->place = place;
  block->vote |= vote;
  if (++block->waiting < threads) {
    wait_while(State::barrier);
    return block->verdict;
  }
  block->verdict = block->vote, block->vote = false, block->waiting = 0;
  for (unsigned t = 0; t < threads; t++)
    if (block->fibers[t].state == State::barrier) block->fibers[t].state = State::runnable;
  return block->verdict;
}

// ---- Warp operations -----------------------------------------------------------------------------------------------

template <class Read>
auto meet(unsigned mask, uint64_t value, Place place, Read read) {
  if (!(mask >> self->lane & 1)) fail("lane %u is not in its own mask %08x, line %u", self->lane, mask, place.line());
  Meeting *open = nullptr, *free = nullptr;
  for (Meeting& m : block->meetings[self->warp]) {
    if (!m.mask) {
      if (!free) free = &m;
    } else if (m.mask == mask && !m.complete()) {
      open = &m;
    } else if (m.mask & mask && !m.complete()) {
      fail("lanes name overlapping masks %08x and %08x, lines %u and %u", m.mask, mask, m.place.line(), place.line());
    }
  }
  if (open && !same(open->place, place))
    fail("lanes of one mask are at different warp operations, lines %u and %u", open->place.line(), place.line());
  if (!open) {
    if (!free) fail("more than %u warp operations in progress", MEETINGS);
    open = free;
    open->mask = mask, open->arrived = open->left = 0, open->place = place;
  }
  open->arrived |= 1u << self->lane;
  open->value[self->lane] = value;
  self->place = place, self->meeting = open;
  if (open->complete()) {
    for (unsigned t = self->warp * 32; t < self->warp * 32 + 32; t++)
      if (block->fibers[t].state == State::warp && block->fibers[t].meeting == open)
        block->fibers[t].state = State::runnable;
  } else {
    wait_while(State::warp);
  }
  const auto result = read(open->value, mask, self->lane);
  open->left |= 1u << self->lane;
  if (open->left == mask) open->mask = 0;
  return result;
}

template <class T>
T shuffle(unsigned mask, T value, int source, Place place) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  if (source >= 0 && !(mask >> source & 1))
    fail("lane %u reads lane %d, which is not in mask %08x, line %u", self->lane, source, mask, place.line());
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  const uint64_t read = meet(mask, bits, place, [=](const uint64_t* v, unsigned, unsigned lane) {
    return v[source < 0 ? lane : unsigned(source)];
  });
  memcpy(&value, &read, sizeof(T));
  return value;
}

// ---- The scheduler -------------------------------------------------------------------------------------------------

inline void begin(Block& b, uint64_t index) {
  const dim3 &g = launch.grid, &d = launch.dim;
  b.live = true, b.vote = false, b.waiting = b.ended = 0;
  b.index = {unsigned(index % g.x), unsigned(index / g.x % g.y), unsigned(index / g.x / g.y)};
  memset(b.shared, POISON, shared_size);
  for (auto& warp : b.meetings)
    for (Meeting& m : warp) m.mask = 0;
  for (unsigned t = 0; t < d.x * d.y * d.z; t++) {
    Fiber& f = b.fibers[t];
    f.state = State::runnable, f.thread = {t % d.x, t / d.x % d.y, t / (d.x * d.y)}, f.lane = t % 32, f.warp = t / 32;
  }
}

// Runs every runnable thread of a block until it has to wait; in random order, skips some of them.
inline void sweep(unsigned slot) {
  Block& b = *blocks[slot];
  block = &b;
  const unsigned threads = launch.dim.x * launch.dim.y * launch.dim.z;
  memcpy(shared_begin, b.shared, shared_size);
  static unsigned turn[MAX_THREADS];
  for (unsigned i = 0; i < threads; i++) turn[i] = launch.order == 1 ? threads - 1 - i : i;
  for (unsigned i = threads - 1; launch.order > 1 && i; i--) {
    const unsigned j = unsigned(draw() % (i + 1)), t = turn[i];
    turn[i] = turn[j], turn[j] = t;
  }
  unsigned progress = 0, runnable = 0;
  for (unsigned i = 0; i < threads; i++) {
    const unsigned t = turn[i];
    if (b.fibers[t].state != State::runnable) continue;
    runnable++;
    if (launch.order > 1 && draw() % 8 == 0) continue;
    progress++;
    resume(b.fibers[t], slot, t);
  }
  memcpy(b.shared, shared_begin, shared_size);
  if (b.ended == threads) b.live = false;
  if (progress || runnable || !b.live) return;
  for (State waits : {State::warp, State::barrier})  // what waits for a warp is the cause
    for (unsigned t = 0; t < threads; t++) {
      self = &b.fibers[t];
      if (self->state != waits) continue;
      if (waits == State::warp)
        fail("deadlock: lanes %08x of mask %08x wait at line %u for lanes that do not come", self->meeting->arrived,
             self->meeting->mask, self->place.line());
      fail("deadlock: %u of %u threads wait at __syncthreads, line %u; %u have ended", b.waiting, threads,
           self->place.line(), b.ended);
    }
}

// The next block to start; in random order, one of the next few.
struct Queue {
  static constexpr unsigned WINDOW = 16;
  uint64_t count, next = 0, window[WINDOW];
  unsigned held = 0;

  bool take(uint64_t& index) {
    for (; held < WINDOW && next < count; next++) window[held++] = launch.order == 1 ? count - 1 - next : next;
    if (!held) return false;
    const unsigned i = launch.order > 1 ? unsigned(draw() % held) : 0;
    index = window[i];
    held--;
    for (unsigned j = i; j < held; j++) window[j] = window[j + 1];
    return true;
  }
};

inline void run(unsigned resident) {
  Queue queue = {uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z};
  for (uint64_t done = 0, index; done < queue.count;) {
    for (unsigned slot = 0; slot < resident; slot++) {
      if (!blocks[slot]->live && queue.take(index)) begin(*blocks[slot], index);
      if (!blocks[slot]->live || (launch.order > 1 && draw() % 3 == 0)) continue;
      sweep(slot);
      if (!blocks[slot]->live) done++;
    }
  }
}

inline void prepare(unsigned resident) {
  constexpr size_t all = STACK * MAX_THREADS * MAX_RESIDENT;
  if (!stacks) {  // address space only; pages are allocated on first use
    void* space = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) fail("no address space for the threads' stacks");
    stacks = static_cast<char*>(space);
  }
  for (unsigned slot = 0; slot < resident; slot++) {
    if (!blocks[slot]) {
      blocks[slot] = new Block;
      blocks[slot]->shared = static_cast<char*>(malloc(shared_size));
    }
    blocks[slot]->live = false;
  }
}

// After a failure, fibers are in the middle of a kernel; they are restarted next time.
inline void abandon() {
  for (Block* b : blocks)
    if (b)
      for (Fiber& f : b->fibers) f.started = false, f.state = State::ended;
}

template <class... A>
void call(void (*kernel)(A...), void** arguments) {
  [&]<size_t... I>(std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<A>*>(arguments[I])...);
  }(std::index_sequence_for<A...>{});
}
inline bool add(const char* name, Entry entry) {
  kernels[kernel_count++] = {name, entry};
  return true;
}

}  // namespace hostsim

#include "launch.hpp"
