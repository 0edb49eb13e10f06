//! Every invariant of a pool between two calls.

use super::Writer;
use super::block::State;
use crate::class::{Class, Standing};
use crate::error::Broken;
use crate::id::BlockId;
use crate::store::Lookup;

type Check = Result<(), Broken>;

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Check {
    if holds { Ok(()) } else { Err(Broken(what())) }
}

impl Writer {
    /// Checks the whole structure.
    pub(super) fn check(&self) -> Check {
        let mut free = vec![false; self.pool.config.max_blocks];
        for id in self.blank.walk(self.blocks()) {
            self.mark_free(&mut free, id)?;
            let is_blank = self.block(id).state() == State::BLANK;
            ensure(is_blank, || format!("block {id} is among the blank ones and not blank"))?;
        }
        let mut listed = 0;
        for class in Class::all() {
            listed += self.check_list(class, &mut free)?;
        }
        let counted = self.num_listed;
        ensure(listed == counted, || {
            format!("{listed} blocks are in lists, {counted} are counted")
        })?;
        // The leaving blocks among them do not count.
        let below = free[..self.size.end].iter().filter(|&&free| free).count();
        ensure(below == self.free, || {
            format!("{below} blocks are free, {} are counted", self.free)
        })?;
        (1..free.len()).try_for_each(|index| self.check_block(index, free[index]))?;
        self.check_counts()?;
        self.check_contents()
    }

    /// Marks a block as free; fails if it was already, or is not in the pool.
    fn mark_free(&self, free: &mut [bool], id: BlockId) -> Check {
        ensure(!id.is_null() && !self.pool.records.is_retired(id), || {
            format!("block {id} is free and not in the pool")
        })?;
        let before = std::mem::replace(&mut free[id.index()], true);
        ensure(!before, || format!("block {id} is free twice"))
    }

    fn check_list(&self, class: Class, free: &mut [bool]) -> Result<usize, Broken> {
        let list = self.list(class);
        let blocks: Vec<BlockId> = list.walk(self.blocks()).collect();
        for &id in &blocks {
            self.mark_free(free, id)?;
            let own = self.block(id).state().list();
            ensure(own == Some(class), || {
                format!("block {id} of {own:?} is in the list of {class:?}")
            })?;
        }
        ensure(list.is_linked(self.blocks(), &blocks), || {
            format!("the links, the ends or the length of the list of {class:?} are wrong")
        })?;
        let used = self.used.contains(class) || blocks.is_empty();
        ensure(used, || format!("the list of {class:?} is not marked as used"))?;
        Ok(blocks.len())
    }

    fn check_block(&self, index: usize, is_free: bool) -> Check {
        let id = BlockId::new(index as u32);
        let (block, above) = (self.block(id), self.is_above(id));
        let (state, retired) = (block.state(), self.pool.records.is_retired(id));
        ensure(!(state.is_in_use() && is_free), || format!("block {id} is in use and free"))?;
        ensure(state.is_in_use() || is_free || above, || format!("block {id} is lost"))?;
        ensure(state.is_in_use() || is_free || state == State::BLANK, || {
            format!("block {id} stands nowhere and is not blank")
        })?;
        ensure(!retired || !block.has_content() && !is_free, || {
            format!("block {id} is retired and free, or has content")
        })?;
        ensure(block.has_content() || state.standing() == Standing::default(), || {
            format!("block {id} has a class or a pin without content")
        })
    }

    fn check_counts(&self) -> Check {
        let (end, num_blocks) = (self.size.end, self.num_blocks());
        ensure(end <= num_blocks, || format!("blocks up to {end} of {num_blocks} are handed out"))?;
        let above = self.blocks()[end..].iter().filter(|block| block.state().is_in_use()).count();
        let counted = self.size.in_use_above;
        ensure(above == counted, || {
            format!("{above} blocks above the end are in use, {counted} are counted")
        })?;
        let pinned = self.blocks().iter().filter(|block| block.state().is_pinned()).count();
        let counted = self.pool.counters.pinned();
        ensure(pinned == counted, || format!("{pinned} blocks are pinned, {counted} are counted"))
    }

    /// The index and the count over all content.
    fn check_contents(&self) -> Check {
        let surplus = self.pool.counters.surplus.get();
        let cached = self.pool.records.check_contents(surplus).map_err(Broken)?;
        ensure(cached == self.cached, || {
            format!("{cached} blocks are cached, {} are counted", self.cached)
        })
    }
}
