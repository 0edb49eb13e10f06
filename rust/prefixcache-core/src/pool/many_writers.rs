//! The pool that several threads change at a time: lock-free. Who has one writer need not know it.
//!
//! Each thread has a [`MultiWriter`] of its own, a clone of the first. Hints, events and counts by bisection need the
//! order of one writer's changes, so it has none of them, and no memory that outlives the process.
//!
//! Free blocks stand in one line: the stack of blank ones (`free_stack.rs`), then a ring (`ring.rs`) for each class,
//! emptied one after the other; what was pinned before a clear goes first of all. The index (`../entries.rs`) finds
//! blocks by content, the block's own state word (`block.rs`) decides every race about it, and credits
//! (`credits.rs`) are taken before blocks are.
//!
//! # What each call promises
//!
//! * Lookups are those of `records.rs`: wait-free, in parallel with any number of writers.
//! * `commit`, `register`, `release`, `pin`, `unpin` and `clear_index` are lock-free: a thread that is
//!   stalled anywhere but in a resize keeps no other from finishing. `commit` is all or nothing, as its credits are
//!   taken first. It is not one atomic point: two threads that allocate at once may interleave their
//!   blocks.
//! * A call is served when what it needs is free, counting as needed by others what their calls ask for
//!   while they run, and one block for each that takes blocks out of the line for a moment, such as `demote`.
//! * `resize`, `begin_moves` and `finish_moves` are refused while another thread is inside a call that takes
//!   blocks, gives them back or moves them. Such calls that begin in the meantime wait for their end; lookups
//!   do not, and find content that moves all the time. A resize in turn waits for registrations that have begun.
//! * Evicting a block takes amortised constant time; a single one may look at up to 256 slots of its line.
//! * From one thread the line is exactly that of the oracle, `prefixcache-oracle`. From several, each
//!   block's history follows the same rules; the line as a whole is only nearly in LRU order.
//! * A thread killed in the middle of a call can take the blocks of that call with it.
//!
//! # What it costs
//!
//! It does not buy throughput: two threads pay an atomic exchange for each block where a mutex is taken once a batch.
//! It buys that nobody holds a lock while attached to the Python interpreter.
//!
//! 112 bytes a block: 64 for the record, 16 for the index at a load of 4/7, 32 for a ring of four slots. Index and
//! ring are powers of two, so that is of as many blocks as a power of two has, and one block more takes 160 each; a
//! ring has 2 MiB at least. 32 more for each further class that is in use, 24 more once somebody listens to
//! evictions. With queues that is six more classes, and up to 70 bytes a block for what the policy remembers.

mod block;
mod bound;
mod credits;
mod either;
mod free_stack;
mod give;
#[cfg(all(test, loom))]
mod models;
mod moves;
mod pool;
mod register;
mod ring;
#[cfg(all(test, shuttle, not(loom)))]
mod schedules;
mod size;
mod standing;
mod take;
mod validate;
mod words;
mod writer;

pub use either::{AnyReader, AnyWriter};
pub use pool::MultiPool;
pub use writer::{MultiReader, MultiWriter};
