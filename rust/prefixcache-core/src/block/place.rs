//! Where a free block stands.

/// A place in a ring: the number of slots handed out before it, modulo 2^40.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(u64);

impl Ticket {
    const BITS: u32 = 40;
    const MASK: u64 = (1 << Self::BITS) - 1;

    /// The ticket `number`, of which the low 40 bits count.
    #[inline]
    pub(crate) const fn new(number: u64) -> Self {
        Self(number & Self::MASK)
    }

    #[inline]
    pub(crate) const fn get(self) -> u64 {
        self.0
    }

    #[inline]
    pub(crate) const fn plus(self, count: u64) -> Self {
        Self::new(self.0.wrapping_add(count))
    }

    #[inline]
    pub(crate) const fn minus(self, count: u64) -> Self {
        Self::new(self.0.wrapping_sub(count))
    }

    /// How many places lie from `earlier` to here; no ring is long enough for this to be ambiguous.
    #[inline]
    pub(crate) const fn since(self, earlier: Self) -> u64 {
        self.0.wrapping_sub(earlier.0) & Self::MASK
    }

    /// Whether this place comes before `other`: less than half the circle behind it.
    #[inline]
    pub(crate) const fn is_before(self, other: Self) -> bool {
        self.0 != other.0 && other.since(self) < 1 << (Self::BITS - 1)
    }
}

/// Which ring a free block stands in; the rings are emptied in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tier {
    Regular,
    Pinned,
}

/// One of something for each tier, at the tier's [index](Tier::index).
pub(crate) type ByTier<T> = [T; Tier::ALL.len()];

impl Tier {
    pub(crate) const ALL: [Self; 2] = [Self::Regular, Self::Pinned];

    #[inline]
    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}

/// Where a free block stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) tier: Tier,
    pub(crate) ticket: Ticket,
}
