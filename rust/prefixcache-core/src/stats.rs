//! Numbers about a pool: lifetime counts, and blocks by state.

/// What a pool can tell of itself. Counts are of its whole life, the rest is of now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Blocks that lost a valid hash because they were handed out again, given up, or left the pool.
    pub evictions: u64,
    /// Blocks handed out without their content: new ones and recycled ones.
    pub allocations: u64,
    /// Blocks taken with their content, as hits.
    pub touches: u64,
    /// Blocks that were pinned, each time anew.
    pub pins: u64,
    /// Pinned blocks that were moved to the regular tier.
    pub demotions: u64,
    /// Those of the evictions whose block was pinned.
    pub pinned_evictions: u64,
    /// Those of the touches whose block was pinned.
    pub pinned_hits: u64,
    /// Blocks whose content was moved to another when the pool shrank.
    pub moved: u64,
    /// Those of the evictions that a shrinking pool had no room for.
    pub lost_to_resize: u64,
    /// Blocks that hold a hash of the current epoch, in use or free.
    pub cached: usize,
    /// Blocks that somebody holds, those that leave the pool at release included.
    pub in_use: usize,
    /// Those of them that a shrink is waiting for, or that have left the pool but for their holders.
    pub held_above: usize,
    /// Blocks that nobody holds and that may be handed out, the cached ones included.
    pub free: usize,
    /// Blocks that carry a pin, held or free. Where the index was cleared since, a block carries it until it
    /// is handed out or loses its content.
    pub pinned: usize,
    /// Free blocks of the pinned tier.
    pub pinned_free: usize,
}
