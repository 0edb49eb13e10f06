//! Bands of priority: how dear a client says that content is.
//!
//! A request may give ranges of its tokens a priority from 0 to 100, which falls into one of eight bands. Free
//! blocks are evicted band by band, and within a band the one that was not used for the longest time first;
//! within the default band the eviction policy decides.
//!
//! | priority | evicted |
//! |---|---|
//! | 0 to 14 | before all other content |
//! | 15 to 34 | before what has no priority |
//! | 35 to 49 | as what has no priority; 35 is the default |
//! | 50 to 59 | after that |
//! | 60 to 69 | later |
//! | 70 to 79 | later |
//! | 80 to 89 | later; within the band pinned blocks come last |
//! | 90 to 100 | last |

/// A band of priority. The lower one is evicted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Band(u8);

impl Band {
    /// How many bands there are.
    pub const COUNT: usize = 8;

    /// Of content that was given no priority.
    pub const DEFAULT: Self = Self(2);

    /// The first to be evicted.
    pub const LOWEST: Self = Self(0);

    /// The highest priority.
    pub const MOST: u8 = 100;

    /// Where the bands begin.
    const FIRST: [u8; Self::COUNT] = [0, 15, 35, 50, 60, 70, 80, 90];

    /// The band of a priority; all from [`Self::MOST`] on are of the last.
    #[must_use]
    pub const fn of(priority: u8) -> Self {
        let mut band = Self::COUNT - 1;
        while priority < Self::FIRST[band] {
            band -= 1;
        }
        Self(band as u8)
    }

    /// The band with this number, from 0.
    pub(crate) const fn new(index: u8) -> Self {
        Self(index)
    }

    /// The band's number, from 0.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// All bands, lowest first.
    pub fn all() -> impl DoubleEndedIterator<Item = Self> {
        (0..Self::COUNT as u8).map(Self)
    }
}

impl Default for Band {
    fn default() -> Self {
        Self::DEFAULT
    }
}
