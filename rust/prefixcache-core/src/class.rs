//! The LRU lists of free blocks, and what decides in which of them a block stands.

use crate::band::Band;
use crate::policy::Queue;

/// Which LRU list a free block stands in. The lists are emptied in this order, the lowest class first; those of
/// the default band, one a [`Queue`], in the order of the policy.
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

    /// Of pinned blocks: the second list of their band, after that of blocks which were given it by a hint.
    pub(crate) const PINNED: Self = Self(14);

    /// The class of each band.
    const OF_BANDS: [u8; Band::COUNT] = [1, 2, Self::DEFAULT.0, 10, 11, 12, 13, 15];

    /// The list of blocks of a band; of the default one's, the first queue's.
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

    /// The list of one of the default class's queues.
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
    pub(crate) const fn without(self, class: Class) -> Self {
        Self(self.0 & !(1 << class.index()))
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

/// Where blocks of the default band go that are released with content.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Destination {
    /// To the queue in which they stood before.
    Same,
    /// To this queue.
    Queue(Queue),
    /// To where the next evictions take from.
    Front,
}

/// The class that content was given, and whether it is pinned: what decides where its block stands while it is free.
///
/// `pinned:1 | class:4`, the class as its difference to the default one: blocks without content have 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Standing(u8);

impl Standing {
    pub(crate) const BITS: u32 = 5;
    const CLASS: u8 = 15;
    const PINNED: u8 = 16;

    /// The standing that these bits stand for, of which [`Self::BITS`] count.
    #[inline]
    pub(crate) const fn from_bits(bits: u8) -> Self {
        Self(bits & (Self::CLASS | Self::PINNED))
    }

    #[inline]
    pub(crate) const fn bits(self) -> u8 {
        self.0
    }

    /// Whether the content was pinned, whatever decides where its block stands.
    #[inline]
    pub(crate) const fn has_pin(self) -> bool {
        self.0 & Self::PINNED != 0
    }

    /// Whether a pin decides where the block stands. One under a higher priority waits for the end of that, and counts
    /// as no pin until then: a demotion could not end it, as it stands in no list of pins.
    #[inline]
    pub(crate) fn is_pinned(self) -> bool {
        self.class() == Class::PINNED
    }

    /// The class that the content was given.
    #[inline]
    pub(crate) fn own_class(self) -> Class {
        Class::new(self.0 ^ Class::DEFAULT.index() as u8)
    }

    /// The class in whose list the block stands, or would at its release. A pin counts unless the own class is above.
    #[inline]
    pub(crate) fn class(self) -> Class {
        if self.has_pin() { self.own_class().max(Class::PINNED) } else { self.own_class() }
    }

    #[inline]
    fn with_own_class(self, class: Class) -> Self {
        let code = class.index() as u8 ^ Class::DEFAULT.index() as u8;
        Self(self.0 & Self::PINNED | code)
    }

    /// With a pin, which makes it forget in which of the default band's classes it stood.
    pub(crate) fn pinned(self) -> Self {
        let own = self.own_class();
        let own = if own.is_of_default_band() { Class::DEFAULT } else { own };
        Self(self.with_own_class(own).0 | Self::PINNED)
    }

    /// Without a pin.
    pub(crate) fn unpinned(self) -> Self {
        Self(self.0 & Self::CLASS)
    }

    /// In this band; of the default one's queues it keeps its own.
    pub(crate) fn in_band(self, band: Band) -> Self {
        match self.own_class().band() == band {
            true => self,
            false => self.with_own_class(Class::of_band(band)),
        }
    }

    /// As it joins its list when the last holder of content lets go.
    #[inline]
    pub(crate) fn released(self, to: Destination) -> Self {
        if !self.class().is_of_default_band() {
            return self;
        }
        self.with_own_class(match to {
            Destination::Front => Class::UNNEEDED,
            Destination::Queue(queue) => Class::of(queue),
            Destination::Same => self.class().max(Class::DEFAULT),
        })
    }
}
