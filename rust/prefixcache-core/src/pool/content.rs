//! What blocks hold: lookups, registrations, and how content is forgotten.

use super::BlockPool;
use crate::block::{Block, Claim, State, Unhold};
use crate::error::Misuse;
use crate::id::{BlockId, Epoch};
use crate::store::{BlockKey, Registration};
use crate::sync::{AtomicU32, AtomicU64, Fault, Mode, Ordering, OwnLine, planted};

use Ordering::Acquire;

/// How many hits to look up ahead of the one at hand.
const PREFETCH_AHEAD: usize = 8;

/// The epoch, and counts over all content.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    /// On a line of its own: every lookup reads it and almost nobody writes it.
    epoch: OwnLine<AtomicU32>,
    census: OwnLine<Census>,
}

#[derive(Debug, Default)]
struct Census {
    /// `epoch:32 | blocks with content of that epoch:32`.
    cached: AtomicU64,
    /// Registrations so far.
    registrations: AtomicU64,
}

impl Contents {
    #[inline]
    pub(crate) fn epoch(&self) -> Epoch {
        // Acquire: who sees a cleared index sees all that came before the clearing.
        Epoch::new(self.epoch.0.load(Acquire))
    }

    /// Ends the epoch, and with it all content.
    pub(super) fn clear<M: Mode>(&self) {
        M::add_short(&self.epoch.0, 1);
        self.count::<M>(self.epoch(), 0);
    }

    /// The number of the next registration; they start at 1.
    fn next_seq<M: Mode>(&self) -> u64 {
        M::count_up(&self.census.0.registrations) + 1
    }

    /// Adds to the number of blocks with content of `epoch`, if it is not over.
    fn count<M: Mode>(&self, epoch: Epoch, change: i32) {
        loop {
            let census = self.census.0.cached.load(Acquire);
            let (then, cached) = ((census >> 32) as u32, census as u32);
            // Epochs wrap around: an earlier one is less than half the circle behind.
            let behind = epoch.get().wrapping_sub(then);
            let cached = match behind {
                0 => cached,
                _ if behind < 1 << 31 => 0,
                _ => return,
            };
            let new = u64::from(epoch.get()) << 32 | u64::from(cached.wrapping_add_signed(change));
            if M::exchange(&self.census.0.cached, census, new).is_ok() {
                return;
            }
        }
    }

    /// How many blocks hold content of the epoch.
    pub(crate) fn cached(&self) -> usize {
        self.census.0.cached.load(Acquire) as u32 as usize
    }
}

impl<M: Mode> BlockPool<M> {
    // Looking.

    /// The first registered block that holds `key`, not counting `but`.
    #[inline]
    pub(super) fn find(&self, key: &BlockKey, but: Option<BlockId>) -> Option<BlockId> {
        let epoch = self.contents.epoch();
        let limit = self.size.num_blocks();
        let mut best: Option<(u64, BlockId)> = None;
        self.index.for_each_candidate(key, |id| {
            let matched = (id.index() < limit && Some(id) != but)
                .then(|| self.block(id).matches(key, epoch))
                .flatten();
            if let Some(seq) = matched
                && best.is_none_or(|(first, _)| seq < first)
            {
                best = Some((seq, id));
            }
        });
        best.map(|(_, id)| id)
    }

    /// Appends the blocks of the leading `keys` that hit.
    pub(super) fn find_leading(&self, keys: &[BlockKey], out: &mut Vec<BlockId>) {
        out.extend(keys.iter().enumerate().map_while(|(position, key)| {
            if let Some(ahead) = keys.get(position + PREFETCH_AHEAD) {
                self.index.prefetch(ahead);
            }
            self.find(key, None)
        }));
    }

    /// Whether a block that the caller holds holds `key`, in this epoch and in the pool.
    #[inline]
    pub(super) fn holds(&self, id: BlockId, key: &BlockKey) -> bool {
        let found = self.block(id).matches(key, self.contents.epoch());
        found.is_some() && !self.is_retired(id)
    }

    /// Whether the content that the block's record names is of this epoch.
    #[inline]
    pub(super) fn is_current(&self, block: &Block) -> bool {
        block.epoch() == self.contents.epoch()
    }

    /// Whether a lookup of the right key would find the block, or one registered before it.
    pub(crate) fn is_cached(&self, id: BlockId) -> bool {
        let block = self.block(id);
        block.state().is_hashed() && self.is_current(block) && !self.is_retired(id)
    }

    // Registering.

    /// Lets a block that the caller holds be found under `key`.
    pub(super) fn enter(
        &self,
        id: BlockId,
        key: BlockKey,
        epoch: Epoch,
    ) -> Result<Registration, Misuse> {
        loop {
            let over = epoch != self.contents.epoch() && !planted(Fault::EpochOfNow);
            if over || self.is_retired(id) {
                return Ok(Registration::Stale);
            }
            let state = self.block(id).state();
            if let Some(outcome) = self.settled(id, state, &key, epoch) {
                return outcome;
            }
            if let Claim::Claimed { was_hashed } = self.block(id).transition_to_claimed::<M>(state)
            {
                if was_hashed {
                    self.forget_all(&[id]);
                }
                return Ok(self.write(id, &key, epoch));
            }
        }
    }

    /// The outcome of a registration that changes nothing.
    fn settled(
        &self,
        id: BlockId,
        state: State,
        key: &BlockKey,
        epoch: Epoch,
    ) -> Option<Result<Registration, Misuse>> {
        let block = self.block(id);
        if !state.is_held() {
            return Some(Err(Misuse::NotInUse(id)));
        }
        if state.is_claimed() {
            // Another thread is about to answer for this block.
            return Some(Ok(Registration::Already));
        }
        if state.is_full() {
            return Some(Err(Misuse::TooManyHolders(id)));
        }
        let current = state.is_hashed() && block.epoch() == epoch;
        current.then(|| match block.key() == *key {
            true => Ok(Registration::Already),
            false => Err(Misuse::OtherHash(id)),
        })
    }

    /// Writes the content of a claimed block, enters it, and ends the claim.
    fn write(&self, id: BlockId, key: &BlockKey, epoch: Epoch) -> Registration {
        let block = self.block(id);
        let epoch = if planted(Fault::EpochOfNow) {
            self.contents.epoch()
        } else {
            epoch
        };
        block.write_content(key, epoch, self.contents.next_seq::<M>());
        let entered = self.index.insert::<M>(key, id);
        if entered {
            self.contents.count::<M>(epoch, 1);
        } else {
            block.erase_content();
        }
        self.end_claim(id, entered);
        // A shrinking thread that did not see the content is seen here, and the other way round; and
        // of two threads that register the same content at least one sees the other.
        M::fence();
        if self.is_retired(id) {
            self.forget_held(id);
            return Registration::Stale;
        }
        match self.find(key, Some(id)) {
            _ if !entered => Registration::Stale,
            Some(other) => Registration::Twin(other),
            None => Registration::New,
        }
    }

    fn end_claim(&self, id: BlockId, hashed: bool) {
        match self.block(id).transition_to_unclaimed::<M>(hashed) {
            Unhold::StillHeld | Unhold::NotHeld => {}
            // Whoever asked for this has released the block meanwhile.
            Unhold::Last(_) => self.give_back_one(id),
        }
    }

    // Forgetting.

    /// Takes the content from a block that others may hold.
    pub(super) fn forget_held(&self, id: BlockId) {
        loop {
            let state = self.block(id).state();
            if !state.is_held() || !state.is_hashed() {
                return;
            }
            if let Claim::Claimed { .. } = self.block(id).transition_to_claimed::<M>(state) {
                self.forget_all(&[id]);
                return self.end_claim(id, false);
            }
        }
    }

    /// Removes blocks, each of which is the caller's alone, from the index; how many held content of
    /// this epoch.
    pub(super) fn forget_all(&self, ids: &[BlockId]) -> u64 {
        const BATCH: usize = 32;
        let mut current = 0;
        for batch in ids.chunks(BATCH) {
            for block in batch
                .iter()
                .map(|&id| self.block(id))
                .filter(|block| block.seq() != 0)
            {
                self.index.prefetch(&block.key());
            }
            current += batch.iter().filter(|&&id| self.forget(id)).count() as u64;
        }
        current
    }

    /// Removes one block from the index; whether it held content of this epoch.
    fn forget(&self, id: BlockId) -> bool {
        let block = self.block(id);
        if block.seq() == 0 {
            return false;
        }
        let (key, epoch) = (block.key(), block.epoch());
        block.erase_content();
        self.index.remove::<M>(&key, id);
        self.contents.count::<M>(epoch, -1);
        epoch == self.contents.epoch()
    }
}
