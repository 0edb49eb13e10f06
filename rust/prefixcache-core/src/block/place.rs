//! Where a free block stands.

use crate::band::Band;
use crate::policy::Queue;

/// A place in a ring: the number of slots handed out before it, modulo 2^39.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(u64);

impl Ticket {
    pub(crate) const BITS: u32 = 39;
    const MASK: u64 = (1 << Self::BITS) - 1;

    /// The ticket `number`, of which the low 39 bits count.
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

/// Which ring a free block stands in. The rings are emptied in this order, the lowest class first; those of
/// the default class, one a [`Queue`], in the order of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Class(u8);

/// One of something for each class, at the class's [index](Class::index).
pub(crate) type ByClass<T> = [T; Class::COUNT];

impl Class {
    pub(crate) const COUNT: usize = 16;

    /// Of content that its last holder needs no more, such as what is behind a window: it is evicted first.
    pub(crate) const UNNEEDED: Self = Self(0);

    /// Of every block that was given no other: the first queue's.
    pub(crate) const DEFAULT: Self = Self(3);

    /// Of pinned blocks: the second line of their band, after that of blocks which were given it by a hint.
    pub(crate) const PINNED: Self = Self(14);

    /// The class of each band.
    const OF_BANDS: [u8; Band::COUNT] = [1, 2, Self::DEFAULT.0, 10, 11, 12, 13, 15];

    /// The ring of blocks of a band; of the default one's, the first queue's.
    #[inline]
    pub(crate) const fn of_band(band: Band) -> Self {
        Self(Self::OF_BANDS[band.index()])
    }

    /// The band of the blocks of each class.
    const BANDS: [Band; Self::COUNT] = {
        let mut bands = [Band::DEFAULT; Self::COUNT];
        let mut band = 0;
        while band < Band::COUNT {
            bands[Self::OF_BANDS[band] as usize] = Band::new(band as u8);
            band += 1;
        }
        // Pins are the second class of the band before theirs.
        bands[Self::PINNED.index()] = bands[Self::PINNED.index() - 1];
        bands
    };

    /// The band that blocks of this class are of.
    #[inline]
    pub(crate) const fn band(self) -> Band {
        Self::BANDS[self.index()]
    }

    /// The ring of one of the default class's queues.
    #[inline]
    pub(crate) const fn of(queue: Queue) -> Self {
        Self(Self::DEFAULT.0 + queue.index() as u8)
    }

    /// Which of the default class's queues this is, if it is one.
    #[inline]
    pub(crate) fn queue(self) -> Option<Queue> {
        let index = self.0.wrapping_sub(Self::DEFAULT.0);
        (usize::from(index) < Queue::COUNT).then(|| Queue::new(index))
    }

    /// Whether blocks of this class were given no priority.
    #[inline]
    pub(crate) fn is_of_default_band(self) -> bool {
        self.queue().is_some() || self == Self::UNNEEDED
    }

    /// Whether blocks of this class are evicted after those of the default class.
    #[inline]
    pub(crate) fn is_above_default(self) -> bool {
        Self::of(Queue::SHARED) < self
    }

    /// The class at this index, of which the low 4 bits count.
    #[inline]
    pub(crate) const fn new(index: u8) -> Self {
        Self(index & (Self::COUNT as u8 - 1))
    }

    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..Self::COUNT as u8).map(Self)
    }

    #[inline]
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A set of classes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClassSet(u16);

impl ClassSet {
    pub(crate) const EMPTY: Self = Self(0);

    /// The set that these bits stand for, one a class, the lowest class in the lowest bit.
    #[inline]
    pub(crate) const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    #[inline]
    pub(crate) const fn bits(self) -> u16 {
        self.0
    }

    #[inline]
    pub(crate) const fn with(self, class: Class) -> Self {
        Self(self.0 | 1 << class.index())
    }

    #[inline]
    pub(crate) const fn contains(self, class: Class) -> bool {
        self.0 >> class.index() & 1 != 0
    }

    /// Those of the set that are emptied after all of the default class.
    pub(crate) const fn above_default(self) -> Self {
        Self(self.0 & (u16::MAX - 1) << Class::of(Queue::SHARED).index())
    }
}

impl Iterator for ClassSet {
    type Item = Class;

    /// The lowest class, which leaves the set.
    #[inline]
    fn next(&mut self) -> Option<Class> {
        let lowest = self.0.trailing_zeros() as u8;
        self.0 &= self.0.wrapping_sub(1);
        (usize::from(lowest) < Class::COUNT).then_some(Class(lowest))
    }
}

/// Where a free block stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) class: Class,
    pub(crate) ticket: Ticket,
}
