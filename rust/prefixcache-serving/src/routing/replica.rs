//! Which replica is meant.

/// The number of a replica; that of a removed one is given again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReplicaId(pub u16);

impl ReplicaId {
    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }
}
