// Threads of a block that wait for each other, as fibers of one thread of the host.
#pragma once

namespace software_cuda {

// Calls thread(i, context) for each i below count, each on a stack of its own, until all have returned. One call at a
// time.
void run_fibers(unsigned count, void (*thread)(unsigned index, void* context), void* context);

// Within `thread`: wait until every thread of the block has come to such a wait, or has returned. Waits for a warp end
// before waits for the block do; which threads make up a warp does not matter, since all others wait, too.
void wait_for_warp();
void wait_for_block();

}  // namespace software_cuda
