//! The obvious table of retention hints: a list of who asked for what, searched from end to end.

use prefixcache_core::band::Band;
use prefixcache_core::groups::{GroupSpec, Groups};
use prefixcache_core::hints::{Hint, Owner};
use prefixcache_core::id::{BlockId, BlockKey, Epoch, GroupId};
use prefixcache_core::retention::{HintStats, MAX_OWNERS, RetentionTable};
use prefixcache_core::sequence::Sequence;
use prefixcache_core::store::BlockStore;

/// A retention table, as a driver of several pools calls it.
pub trait Hinting {
    /// After a commit.
    fn note_hits(&mut self, store: &mut impl BlockStore, sequence: &Sequence);
    /// Before a release.
    fn keep(&mut self, store: &mut impl BlockStore, sequence: &Sequence);
    /// Demotes what has ended.
    fn demote_expired(&mut self, store: &mut impl BlockStore, most: usize) -> usize;
    /// Its counts.
    fn stats(&self) -> HintStats;
}

impl Hinting for RetentionTable {
    fn note_hits(&mut self, store: &mut impl BlockStore, sequence: &Sequence) {
        Self::note_hits(self, store, sequence);
    }

    fn keep(&mut self, store: &mut impl BlockStore, sequence: &Sequence) {
        Self::keep(self, store, sequence);
    }

    fn demote_expired(&mut self, store: &mut impl BlockStore, most: usize) -> usize {
        Self::demote_expired(self, store, most)
    }

    fn stats(&self) -> HintStats {
        Self::stats(self)
    }
}

/// Milliseconds; ends are rounded up to an eighth of a second.
type Time = u64;

/// What one owner asked for one content; nobody for content that is lowered.
#[derive(Clone, Debug)]
struct Asked {
    key: BlockKey,
    owner: Option<Owner>,
    /// For each band the TTL and the end, None: for ever.
    levels: [Option<(Option<Time>, Option<Time>)>; Band::COUNT],
    /// When it was used last, as a count of uses.
    used: u64,
    /// When its next end was last set, as the same count.
    set: u64,
}

impl Asked {
    fn band(&self) -> Option<Band> {
        Band::all().rev().find(|band| self.levels[band.index()].is_some())
    }

    fn due(&self) -> Option<Time> {
        self.levels[self.band()?.index()]?.1
    }
}

/// None is later than all.
fn later<T: Ord>(one: Option<T>, other: Option<T>) -> Option<T> {
    Some(one?.max(other?))
}

/// The slow table.
#[derive(Debug)]
pub struct PlainRetention {
    groups: Groups,
    block_size: usize,
    share: f64,
    now: Time,
    epoch: Epoch,
    /// In the order in which they were made.
    asked: Vec<Asked>,
    uses: u64,
    demoted: u64,
    expired: u64,
}

impl PlainRetention {
    /// A table of a cache with these groups and this block size.
    #[must_use]
    pub fn new(groups: Groups, block_size: usize, share: f64) -> Self {
        Self {
            groups,
            block_size,
            share,
            now: 0,
            epoch: Epoch::default(),
            asked: Vec::new(),
            uses: 0,
            demoted: 0,
            expired: 0,
        }
    }

    /// Only what is there, with the band that was asked for, was asked for.
    fn forget_evicted(&mut self, store: &mut impl BlockStore) {
        self.now = store.clock().now().as_millis() as Time;
        if self.epoch != store.epoch() {
            self.epoch = store.epoch();
            self.asked.clear();
        }
        let keys: Vec<BlockKey> = self.asked.iter().map(|one| one.key).collect();
        for key in keys {
            if store.band(&key) != Some(self.band(&key)) {
                self.asked.retain(|one| one.key != key);
            }
        }
    }

    fn end_of(&self, ttl: Option<Time>) -> Option<Time> {
        ttl.map(|ttl| (self.now + ttl).next_multiple_of(125))
    }

    /// The band that content should have.
    fn band(&self, key: &BlockKey) -> Band {
        let all = self.asked.iter().filter(|one| one.key == *key);
        all.filter_map(Asked::band).max().unwrap_or_default()
    }

    fn note_use(&mut self, at: usize) {
        self.uses += 1;
        (self.asked[at].used, self.asked[at].set) = (self.uses, self.uses);
    }

    fn refresh(&mut self, key: &BlockKey, owner: Owner) {
        if let Some(at) = self.find(key, Some(owner)) {
            let ends = self.asked[at].levels.map(|level| self.end_of(level?.0));
            for (level, end) in self.asked[at].levels.iter_mut().zip(ends) {
                *level = level.map(|(ttl, old)| (ttl, later(old, end)));
            }
            self.note_use(at);
        }
    }

    fn find(&self, key: &BlockKey, owner: Option<Owner>) -> Option<usize> {
        self.asked.iter().position(|one| one.key == *key && one.owner == owner)
    }

    /// Removes an entry; whether its content moved to another band.
    fn end(&mut self, store: &mut impl BlockStore, at: usize) -> bool {
        let before = self.band(&self.asked[at].key);
        let key = self.asked.remove(at).key;
        self.move_from(store, &key, before)
    }

    fn move_from(&self, store: &mut impl BlockStore, key: &BlockKey, before: Band) -> bool {
        let after = self.band(key);
        after != before
            && store.band(key) == Some(before)
            && store.set_band(key, BlockId::NULL, after)
    }

    fn ask(
        &mut self,
        store: &mut impl BlockStore,
        key: BlockKey,
        owner: Option<Owner>,
        wishes: &[(Band, Option<Time>)],
        held: BlockId,
    ) {
        let at = self.find(&key, owner).unwrap_or_else(|| {
            self.asked.push(Asked { key, owner, levels: [None; _], used: 0, set: 0 });
            self.asked.len() - 1
        });
        for &(band, ttl) in wishes {
            let end = self.end_of(ttl);
            let level = &mut self.asked[at].levels[band.index()];
            let (old_ttl, old_end) = level.unwrap_or((Some(0), Some(0)));
            *level = Some((later(old_ttl, ttl), later(old_end, end)));
        }
        self.note_use(at);
        let band = self.band(&key);
        if store.band(&key).is_some_and(|now| now != band) {
            store.set_band(&key, held, band);
        }
    }

    /// The blocks that a sequence has published, and those of them that it holds.
    fn published<'a>(
        &'a self,
        sequence: &'a Sequence,
    ) -> impl DoubleEndedIterator<Item = (usize, BlockKey, GroupSpec, BlockId)> + 'a {
        let full = sequence.num_filled() / self.block_size;
        let groups: Vec<_> = self.groups.each().collect();
        let all = (0..full).flat_map(move |index| {
            let of_group = |&(group, spec): &(GroupId, GroupSpec)| {
                let hash = sequence.hashes()[index];
                let block = sequence.block_table(group.index())[index];
                (index, BlockKey::new(hash, group), spec, block)
            };
            groups.iter().map(of_group).collect::<Vec<_>>()
        });
        all.collect::<Vec<_>>().into_iter()
    }

    /// What raises a block: the ranges that end behind it, at whose end it is needed.
    fn raising(
        &self,
        hints: &[Hint],
        index: usize,
        spec: GroupSpec,
        full: usize,
    ) -> Vec<(Band, Option<Time>)> {
        let size = self.block_size;
        let raises = |hint: &&Hint| {
            let end = hint.end.map_or(full, |end| full.min(end / size));
            let needed = match spec.needs_whole_prefix() {
                true => 0,
                false if spec == GroupSpec::State => spec.first_needed(end * size, size),
                false => spec.first_needed(end * size, size).saturating_sub(1),
            };
            Band::of(hint.priority) > Band::DEFAULT && needed <= index && index < end
        };
        hints.iter().filter(raises).map(wish).collect()
    }

    /// The band of a token that is below the default one, by the definition: it is as dear as the dearest of it and
    /// what was said of later ones, and no dearer than any before it.
    fn lowered(hints: &[Hint], token: usize) -> Option<Band> {
        let said = |at: usize| {
            let covers = |hint: &&Hint| hint.start <= at && hint.end.is_none_or(|end| at < end);
            hints.iter().find(covers).map(|hint| Band::of(hint.priority))
        };
        let horizon = hints.iter().map(|hint| hint.end.unwrap_or(hint.start)).max()?;
        let horizon = horizon.max(token) + 1;
        let dear = |at: usize| {
            let later = (at + 1..=horizon).filter_map(said).max();
            Some(said(at).unwrap_or_default()).max(later)
        };
        (0..=token).filter_map(dear).min().filter(|&band| band < Band::DEFAULT)
    }

    fn lower(&mut self, store: &mut impl BlockStore, sequence: &Sequence, hints: &[Hint]) {
        let size = self.block_size;
        let published: Vec<_> = self.published(sequence).collect();
        // Groups in their order, blocks from the last on.
        for index in (sequence.num_hits() / size..sequence.num_filled() / size).rev() {
            let Some(band) = Self::lowered(hints, index * size) else {
                continue;
            };
            let last = hints.iter().rev().find(|hint| hint.start <= index * size);
            let ttl = last.and_then(|hint| wish(hint).1);
            for &(at, key, _, block) in &published {
                let known = self.asked.iter().any(|one| one.key == key);
                if at == index && !known && !block.is_null() && store.lookup(&key) == Some(block) {
                    self.ask(store, key, None, &[(band, ttl)], block);
                }
            }
        }
    }
}

fn wish(hint: &Hint) -> (Band, Option<Time>) {
    let ttl = hint.ttl.map(|ttl| (ttl.as_millis() as Time).max(1));
    (Band::of(hint.priority), ttl)
}

impl Hinting for PlainRetention {
    fn note_hits(&mut self, store: &mut impl BlockStore, sequence: &Sequence) {
        let hits = sequence.num_hits() / self.block_size;
        self.forget_evicted(store);
        if hits == 0 {
            return;
        }
        // One owner's count as used after those of the owner before.
        let mut used: Vec<(Owner, Vec<BlockKey>)> = Vec::new();
        for index in (0..hits).rev() {
            for (group, _) in self.groups.clone().each() {
                let block = sequence.block_table(group.index())[index];
                if block.is_null() || store.held_band(block) == Band::DEFAULT {
                    continue;
                }
                let key = BlockKey::new(sequence.hashes()[index], group);
                for at in (0..self.asked.len()).rev() {
                    if self.asked[at].key != key {
                        continue;
                    }
                    let Some(owner) = self.asked[at].owner else {
                        self.end(store, at);
                        continue;
                    };
                    match used.iter_mut().find(|(other, _)| *other == owner) {
                        Some((_, keys)) => keys.push(key),
                        None => used.push((owner, vec![key])),
                    }
                }
            }
        }
        for (owner, keys) in used {
            keys.iter().for_each(|key| self.refresh(key, owner));
        }
    }

    fn keep(&mut self, store: &mut impl BlockStore, sequence: &Sequence) {
        let Some(hints) = sequence.hints().filter(|_| sequence.is_committed()) else {
            return;
        };
        self.forget_evicted(store);
        if sequence.epoch() != Some(self.epoch) {
            return;
        }
        let (owner, hints) = (hints.owner(), hints.ranges());
        let full = sequence.num_filled() / self.block_size;
        let most = (self.share * (store.num_blocks() - 1) as f64) as usize;
        let mut ended = vec![false; self.groups.count()];
        let mut raised = Vec::new();
        for (index, key, spec, block) in self.published(sequence) {
            let wishes = self.raising(hints, index, spec, full);
            let others = self.asked.iter().filter(|one| one.key == key);
            let others = others.filter(|one| one.owner.is_some_and(|other| other != owner));
            if wishes.is_empty() || ended[key.group.index()] {
                continue;
            }
            if others.count() < MAX_OWNERS && store.lookup(&key).is_some() {
                raised.push((key, wishes, block));
            } else {
                ended[key.group.index()] = spec.needs_whole_prefix();
            }
        }
        raised.truncate(most);
        self.lower(store, sequence, hints);
        for (key, wishes, block) in raised.into_iter().rev() {
            self.ask(store, key, Some(owner), &wishes, block);
        }
        loop {
            let own = self.asked.iter().enumerate();
            let own = own.filter(|(_, one)| one.owner == Some(owner));
            let (count, oldest) = (own.clone().count(), own.min_by_key(|(_, one)| one.used));
            match oldest.map(|(at, _)| at) {
                Some(at) if count > most => self.demoted += u64::from(self.end(store, at)),
                _ => return,
            }
        }
    }

    fn demote_expired(&mut self, store: &mut impl BlockStore, most: usize) -> usize {
        self.forget_evicted(store);
        let mut moved = 0;
        for _ in 0..most {
            let due = self.asked.iter().enumerate();
            let due = due.filter_map(|(at, one)| Some((one.due()?, one.set, at)));
            let Some((due, _, at)) = due.min().filter(|&(due, ..)| due <= self.now) else {
                break;
            };
            let key = self.asked[at].key;
            let before = self.band(&key);
            for level in &mut self.asked[at].levels {
                *level = level.filter(|(_, end)| end.is_none_or(|end| end > due));
            }
            if self.asked[at].band().is_none() {
                self.asked.remove(at);
            } else {
                self.uses += 1;
                self.asked[at].set = self.uses;
            }
            let has_moved = self.move_from(store, &key, before);
            self.expired += u64::from(has_moved && self.band(&key) == Band::DEFAULT);
            moved += usize::from(has_moved);
        }
        moved
    }

    fn stats(&self) -> HintStats {
        let mut contents: Vec<BlockKey> = self.asked.iter().map(|one| one.key).collect();
        contents.sort_by_key(|key| (key.hash, key.group));
        contents.dedup();
        let mut stats = HintStats::default();
        (stats.hinted, stats.demoted, stats.expired) = (contents.len(), self.demoted, self.expired);
        stats
    }
}
