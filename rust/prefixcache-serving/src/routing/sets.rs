//! Sets of holders, each stored once however many blocks have it.
//!
//! The blocks of a prompt are cached together, so along a prompt the same set comes again and again. An entry of
//! the index is then the number of its set, and a walk along a prompt looks at members only where the number changes.

use std::collections::HashMap;
use std::sync::Arc;

/// A holder of blocks: what a replica has cached since it was cleared last, or what it is expected to cache.
pub(crate) type Slot = u16;

/// The number of a set. Sets with the same members have the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SetId(u32);

/// The set without members, which always exists.
pub(crate) const EMPTY: SetId = SetId(0);

struct Set {
    /// In rising order.
    members: Arc<[Slot]>,
    /// Entries of the index that have this set.
    entries: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    Insert(Slot),
    Remove(Slot),
}

/// All sets that entries have.
pub(crate) struct Sets {
    sets: Vec<Set>,
    free: Vec<SetId>,
    by_members: HashMap<Arc<[Slot]>, SetId>,
    /// The last change of an entry: the blocks of one event mostly have the same.
    last: Option<(SetId, Change, SetId)>,
}

impl Sets {
    pub(crate) fn new() -> Self {
        let members: Arc<[Slot]> = Arc::new([]);
        let by_members = HashMap::from([(Arc::clone(&members), EMPTY)]);
        Self { sets: vec![Set { members, entries: 1 }], free: Vec::new(), by_members, last: None }
    }

    pub(crate) fn members(&self, set: SetId) -> &[Slot] {
        &self.sets[set.0 as usize].members
    }

    /// What an entry of `set` has once `slot` holds the block too. A new entry has the empty set.
    pub(crate) fn insert(&mut self, set: SetId, slot: Slot) -> SetId {
        self.change(set, Change::Insert(slot))
    }

    /// What an entry of `set` has once `slot` no longer holds the block.
    pub(crate) fn remove(&mut self, set: SetId, slot: Slot) -> SetId {
        self.change(set, Change::Remove(slot))
    }

    fn change(&mut self, set: SetId, change: Change) -> SetId {
        let to = match self.last {
            Some((from, same, to)) if (from, same) == (set, change) => to,
            _ => self.find_changed(set, change),
        };
        self.last = Some((set, change, to));
        self.move_entry(set, to);
        to
    }

    fn find_changed(&mut self, set: SetId, change: Change) -> SetId {
        let members = self.members(set);
        let mut changed = members.to_vec();
        match change {
            Change::Insert(slot) => match members.binary_search(&slot) {
                Ok(_) => return set,
                Err(place) => changed.insert(place, slot),
            },
            Change::Remove(slot) => match members.binary_search(&slot) {
                Ok(place) => drop(changed.remove(place)),
                Err(_) => return set,
            },
        }
        self.find(changed)
    }

    /// What an entry of `set` has once only the slots that `is_kept` names hold the block.
    pub(crate) fn retain(&mut self, set: SetId, is_kept: impl Fn(Slot) -> bool) -> SetId {
        let members = self.members(set);
        if members.iter().all(|&slot| is_kept(slot)) {
            return set;
        }
        let kept = members.iter().copied().filter(|&slot| is_kept(slot)).collect();
        let to = self.find(kept);
        self.move_entry(set, to);
        to
    }

    fn find(&mut self, members: Vec<Slot>) -> SetId {
        if let Some(&set) = self.by_members.get(members.as_slice()) {
            return set;
        }
        let members: Arc<[Slot]> = members.into();
        let set = self.free.pop().unwrap_or(SetId(self.sets.len() as u32));
        self.by_members.insert(Arc::clone(&members), set);
        let made = Set { members, entries: 0 };
        match self.sets.get_mut(set.0 as usize) {
            Some(place) => *place = made,
            None => self.sets.push(made),
        }
        set
    }

    fn move_entry(&mut self, from: SetId, to: SetId) {
        if from == to {
            return;
        }
        // The empty set is that of no entry, so it is never counted.
        if to != EMPTY {
            self.sets[to.0 as usize].entries += 1;
        }
        if from != EMPTY {
            self.drop_entry(from);
        }
    }

    fn drop_entry(&mut self, from: SetId) {
        let set = &mut self.sets[from.0 as usize];
        set.entries -= 1;
        if set.entries > 0 {
            return;
        }
        let members = std::mem::take(&mut set.members);
        self.by_members.remove(&members);
        self.free.push(from);
        // The number may come to stand for another set.
        self.last = self.last.filter(|&(set, _, to)| set != from && to != from);
    }

    /// Sets that some entry has.
    pub(crate) fn count(&self) -> usize {
        self.by_members.len() - 1
    }
}
