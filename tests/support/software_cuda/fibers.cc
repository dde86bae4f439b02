#include "fibers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <vector>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace software_cuda {
namespace {

// A thread of CUDA has 512 KiB of local memory at most, and TVM's use a few.
constexpr size_t kStackBytes = 256 << 10;
// Stacks begin at different places of their pages, or all would compete for the same lines of the cache.
constexpr size_t kColours = 32, kColourBytes = 128;

#ifdef __x86_64__

using Context = void*;

// Saves the registers that a called function must keep, and goes on where the other context was saved.
extern "C" void software_cuda_switch(Context* from, Context to);
asm(R"(
.text
.globl software_cuda_switch
.hidden software_cuda_switch
.type software_cuda_switch, @function
software_cuda_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size software_cuda_switch, . - software_cuda_switch
)");

void change(Context& from, Context& to) { software_cuda_switch(&from, to); }

void prepare(Context& context, char* stack, size_t size, void (*entry)()) {
  // As if `entry` had been called: the stack pointer is 8 bytes off a multiple of 16 when it starts.
  void** place = reinterpret_cast<void**>(stack + size) - 2;
  *place = reinterpret_cast<void*>(entry);
  context = place - 6;
}

#else

using Context = ucontext_t;

void change(Context& from, Context& to) { swapcontext(&from, &to); }

void prepare(Context& context, char* stack, size_t size, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = size;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

#endif

enum State { kReady, kWaitsForWarp, kWaitsForBlock, kDone };

struct Fiber {
  char* stack;
  Context context;
  State state;
};

// Never destroyed: a thread may run a kernel until the process has ended.
auto& fibers = *new std::vector<Fiber>;
Context scheduler;
Fiber* current;
// Fibers before `end` in the state `running` run now, one after the other.
Fiber* end;
State running;
void (*body)(unsigned, void*);
void* body_context;

char* new_stack() {
  void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  // A page that nobody may touch ends the process where a kernel's local arrays are too large.
  if (stack == MAP_FAILED || mprotect(stack, getpagesize(), PROT_NONE) != 0) {
    perror("software CUDA: no stack for a thread");
    abort();
  }
  return static_cast<char*>(stack);
}

void leave(State state) {
  Fiber* self = current;
  self->state = state;
  do ++current;
  while (current != end && current->state != running);
  change(self->context, current == end ? scheduler : current->context);
}

void enter() {
  body(current - fibers.data(), body_context);
  leave(kDone);
}

}  // namespace

void run_fibers(unsigned count, void (*thread)(unsigned index, void* context), void* context) {
  body = thread;
  body_context = context;
  while (fibers.size() < count) fibers.push_back({new_stack(), {}, kDone});
  for (unsigned i = 0; i < count; ++i) {
    prepare(fibers[i].context, fibers[i].stack, kStackBytes - i % kColours * kColourBytes, enter);
    fibers[i].state = kReady;
  }
  end = fibers.data() + count;
  current = fibers.data();
  running = kReady;
  while (running != kDone) {
    change(scheduler, current->context);
    // The first of those that wait for the least.
    running = kDone;
    for (Fiber* fiber = end; fiber-- != fibers.data();)
      if (fiber->state <= running) running = (current = fiber)->state;
  }
}

void wait_for_warp() { leave(kWaitsForWarp); }
void wait_for_block() { leave(kWaitsForBlock); }

}  // namespace software_cuda
