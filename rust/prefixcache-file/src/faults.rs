//! What tests do to a process: they end it at a write, or plant a fault. Without tests no write looks at it.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Faults that the tests plant, to see that they are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "planted by tests alone"))]
pub(crate) enum Fault {
    /// A block's record is made before its bytes are there.
    RecordFirst,
    /// Bytes are not compared with their checksum.
    NoChecksum,
    /// Bytes that another process left go to a tier as they are.
    StageUnread,
    /// Records of an earlier epoch count.
    StaleEpoch,
    /// A clear does not reach the file.
    KeepCleared,
    /// Records are made whatever the weights are called.
    KeepTags,
    /// A record stays while its block is written to.
    KeepEvicted,
    /// The disk takes no header: no fault of ours, it must be counted.
    FailedSync,
}

#[derive(Debug)]
pub(crate) struct Injected {
    pub(crate) fault: Option<Fault>,
    /// Writes until the process dies.
    pub(crate) writes_left: AtomicU64,
}

impl Default for Injected {
    fn default() -> Self {
        Self { fault: None, writes_left: AtomicU64::new(u64::MAX) }
    }
}

impl Injected {
    /// Counts a write; whether it still happens.
    #[inline]
    pub(crate) fn survives_write(&self) -> bool {
        if cfg!(not(test)) {
            return true;
        }
        let left = self.writes_left.load(Relaxed);
        self.writes_left.store(left.saturating_sub(1), Relaxed);
        left > 0
    }

    #[cfg(test)]
    pub(crate) fn is_dead(&self) -> bool {
        self.writes_left.load(Relaxed) == 0
    }

    #[inline]
    pub(crate) fn plants(&self, fault: Fault) -> bool {
        cfg!(test) && self.fault == Some(fault)
    }
}
