//! A recording's calls, made again.

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;
use std::time::Duration;

use prefixcache_core::cache::CacheBuilder;
use prefixcache_core::error::{CacheError, InvalidArgument, ResizeError};
use prefixcache_core::hints::{Hints, Owner};
use prefixcache_core::sequence::retention::{Pins, Retention};
use prefixcache_core::store::{Lookup, Moves, PoolConfig};
use prefixcache_core::{
    Extras, GroupSpec, Groups, HashConfig, PrefixCache, Scope, Sequence, Writer,
};

use super::events::{
    Added, Counters, Event, Events, Header, RecordedHint, Started, Windows, hint_of,
};
use super::names;
use crate::lines::{Fault, TraceError, check_tokens};

/// Tokens before a prompt's last one of which a model with states keeps no snapshot, as `kv/retention.py` has it.
const EARLY_TOKENS: usize = 8;

/// Contents whose TTL has ended that one call of the server looks at.
const EXPIRED_AT_ONCE: usize = 256;

/// Whether a replay counted what the live server counted.
#[derive(Clone, Debug)]
pub struct Agreement {
    /// What the recording says of the cache.
    pub header: Header,
    /// The parts that were read.
    pub parts: u64,
    /// Requests that were added.
    pub requests: u64,
    /// Events that were replayed, up to the first difference.
    pub events: u64,
    /// Points at which all counts were compared, and were the same.
    pub checks: u64,
    /// Events after the last of these points, whose counts nobody compared.
    pub unchecked: u64,
    /// What the live server counted at the last point that was read.
    pub live: Counters,
    /// What the replay counted there.
    pub replayed: Counters,
    /// Where the two differ first, and how.
    pub difference: Option<String>,
    /// Why the recording ended; none where it was cut off.
    pub ended: Option<String>,
}

impl Agreement {
    /// Whether counts were compared, and all of them were the same.
    #[must_use]
    pub fn agrees(&self) -> bool {
        self.checks > 0 && self.difference.is_none()
    }
}

/// Makes the calls of a recording to a cache of its size and policy, in their order, up to the first that has
/// another outcome than it had in the live server.
pub fn replay(path: &Path) -> Result<Agreement, TraceError> {
    let mut events = Events::open(path)?;
    let header = events.header().clone();
    let mut cache = Cache::new(&header).map_err(|fault| events.invalid(fault))?;
    let mut found = Agreement {
        header,
        parts: 1,
        requests: 0,
        events: 0,
        checks: 0,
        unchecked: 0,
        live: Counters::default(),
        replayed: Counters::default(),
        difference: None,
        ended: None,
    };
    while let Some(line) = events.read()? {
        cache.set_time(line.t);
        found.events += 1;
        let outcome = match line.event {
            Event::Next {} => {
                events.open_next()?;
                found.parts += 1;
                continue;
            }
            Event::Stop { reason } => {
                found.ended = Some(reason);
                continue;
            }
            Event::Counters(live) => {
                (found.live, found.replayed) = (live, cache.counters());
                found.unchecked = 0;
                compare(&found.live, &found.replayed).map(|()| found.checks += 1)
            }
            event => {
                found.unchecked += 1;
                found.requests += u64::from(matches!(event, Event::Add(_)));
                cache.apply(event)
            }
        };
        match outcome {
            Ok(()) => {}
            Err(Stop::Invalid(fault)) => return Err(events.invalid(fault)),
            Err(Stop::Differs(how)) => {
                found.difference = Some(format!("{}: {how}", events.place()));
                break;
            }
        }
    }
    Ok(found)
}

fn compare(live: &Counters, replayed: &Counters) -> Result<(), Stop> {
    let pairs = live.named().into_iter().zip(replayed.named());
    let other = pairs.filter(|(live, replayed)| live != replayed);
    let found: Vec<String> = other
        .map(|((name, live), (_, replayed))| format!("{name} {live} live and {replayed} replayed"))
        .collect();
    match found.is_empty() {
        true => Ok(()),
        false => Err(Stop::Differs(found.join(", "))),
    }
}

/// Why an event was not replayed.
enum Stop {
    /// It is not what the form asks for.
    Invalid(Fault),
    /// It had another outcome than in the live server.
    Differs(String),
}

impl From<CacheError> for Stop {
    fn from(error: CacheError) -> Self {
        Self::Differs(format!("the replayed cache refuses: {error}"))
    }
}

impl From<ResizeError> for Stop {
    fn from(error: ResizeError) -> Self {
        Self::Differs(format!("the replayed cache refuses: {error}"))
    }
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Self::Invalid(fault)
    }
}

fn invalid<T>(field: &'static str, reason: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Invalid(Fault::new(field, reason)))
}

fn no_request(id: u64) -> Stop {
    Fault::new("id", format!("must be of a request, not {id}")).into()
}

/// A request that waits or runs.
struct Request {
    sequence: Sequence,
    /// Its full blocks as far as they are known.
    blocks: Vec<u64>,
    prompt_blocks: usize,
    is_hashed: bool,
    hints: Option<Hints>,
    prompt_end: usize,
    write_upto: Option<usize>,
    is_pinned: bool,
}

/// The cache of a replay, and what the server's cache manager does around it.
struct Cache {
    cache: PrefixCache<Writer>,
    moves: Moves,
    block_size: usize,
    deduplicates: bool,
    windows: Option<Windows>,
    /// How many tokens before a prompt's last one its anchor stands.
    early: usize,
    requests: HashMap<u64, Request>,
    /// Tokens that were looked up beyond full blocks: the replayed sequences have none.
    rest_queries: u64,
}

impl Cache {
    fn new(header: &Header) -> Result<Self, Fault> {
        let refused = |error: &dyn Error| Fault::new("header", format!("is refused: {error}"));
        let found = |error: InvalidArgument| refused(&error);
        let hashing =
            HashConfig::new(header.block_size, Groups::new(header.groups.clone()).map_err(found)?)
                .with_model("recording", "", "");
        hashing.check().map_err(found)?;
        let pool = PoolConfig::new(header.num_blocks)
            .with_max_blocks(header.max_blocks)
            .with_free_order(header.free_order)
            .with_eviction_policy(header.eviction_policy);
        let pool = Writer::new(pool).map_err(|error| refused(&error))?;
        let cache = CacheBuilder::new(hashing).hints(header.retention_budget);
        let mut cache = cache.build(pool).map_err(found)?;
        cache.set_max_cached(header.max_cached_blocks);
        Ok(Self {
            cache,
            moves: Moves::default(),
            block_size: header.block_size,
            deduplicates: header.merge_duplicates,
            windows: header.retention,
            early: match header.groups.contains(&GroupSpec::State) {
                true => EARLY_TOKENS,
                false => 0,
            },
            requests: HashMap::new(),
            rest_queries: 0,
        })
    }

    /// Sets the time of an event, as the server did: half a millisecond on, so that no rounding of seconds
    /// leads to the millisecond before.
    fn set_time(&mut self, time_ms: u64) {
        let now = Duration::from_micros(time_ms.saturating_mul(1000).saturating_add(500));
        self.cache.set_time(now);
    }

    fn counters(&self) -> Counters {
        let (tokens, blocks) = (self.cache.stats(), self.cache.store().stats());
        Counters {
            queries: tokens.queries + self.rest_queries,
            hits: tokens.hits,
            evictions: blocks.evictions,
            allocations: blocks.allocations,
            touches: blocks.touches,
            pins: blocks.pins,
            demotions: blocks.demotions,
            moved: blocks.moved,
            lost_to_resize: blocks.lost_to_resize,
            cached: blocks.cached as u64,
            in_use: blocks.in_use as u64,
        }
    }

    fn apply(&mut self, event: Event<'_>) -> Result<(), Stop> {
        match event {
            Event::Add(added) => self.add(&added),
            Event::Start(started) => self.start(&started),
            Event::Slots { ids, upto } => self.give_slots(&ids, &upto),
            Event::Snapshots { ids, from } => {
                self.on_batch(&ids, |cache, batch| cache.keep_snapshots(batch, &from)).map(drop)
            }
            Event::Publish { ids, upto, names } => self.publish(&ids, &upto, &names),
            Event::Anchor { id, at } => {
                self.request(id)?.sequence.add_anchor(at);
                Ok(())
            }
            Event::Drop { ids, upto } => {
                self.on_batch(&ids, |cache, batch| cache.drop_unneeded(batch, &upto)).map(drop)
            }
            Event::Preempt { ids } => self.on_batch(&ids, PrefixCache::release),
            Event::Restart { id } => self.restart(id),
            Event::End { ids, well, .. } => self.end(&ids, &well),
            Event::Demote { count } => {
                self.cache.demote(count);
                Ok(())
            }
            Event::Expire {} => {
                self.cache.demote_expired(EXPIRED_AT_ONCE);
                Ok(())
            }
            Event::Reset {} => {
                self.cache.clear_cache_index();
                Ok(())
            }
            Event::Weights {} => {
                self.cache.new_weight_version(None);
                Ok(())
            }
            Event::Move { blocks, most, moved } => self.move_cached(blocks, most, moved),
            Event::Resize { blocks } => Ok(self.cache.resize(blocks).map(drop)?),
            // The caller's.
            Event::Counters(_) | Event::Stop { .. } | Event::Next {} => Ok(()),
        }
    }

    // Requests.

    fn request(&mut self, id: u64) -> Result<&mut Request, Stop> {
        let request = self.requests.get_mut(&id);
        request.ok_or_else(|| no_request(id))
    }

    fn add(&mut self, added: &Added<'_>) -> Result<(), Stop> {
        let &Added { id, tokens, hashed, .. } = added;
        check_tokens("tokens", tokens as u64)?;
        let blocks = names::parse(added.names)?;
        let wanted = if hashed { tokens / self.block_size } else { 0 };
        if blocks.len() != wanted {
            return invalid("names", format!("must be of {wanted} blocks, not {}", blocks.len()));
        }
        let hints = match added.hints.is_empty() {
            true => None,
            false => Some(read_hints(&added.owner, &added.hints)?),
        };
        let request = Request {
            sequence: self.new_sequence(&[]),
            prompt_blocks: blocks.len(),
            blocks,
            is_hashed: hashed,
            hints,
            prompt_end: tokens.saturating_sub(1 + self.early),
            write_upto: added.write_upto.filter(|&upto| upto > 0),
            is_pinned: added.write,
        };
        if self.requests.insert(id, request).is_some() {
            return invalid(
                "id",
                format!("must be new, but {id} is of a request that has not ended"),
            );
        }
        self.restart(id)
    }

    fn new_sequence(&self, blocks: &[u64]) -> Sequence {
        let scope = Scope::default();
        let mut sequence = self.cache.new_sequence(Vec::new(), scope, Extras::new());
        extend(&mut sequence, blocks, self.block_size);
        sequence
    }

    /// Gives a request that holds nothing a sequence of its prompt alone.
    fn restart(&mut self, id: u64) -> Result<(), Stop> {
        let mut request = self.take(id)?;
        if request.sequence.is_committed() {
            return Err(Stop::Differs(format!("request {id} holds blocks already")));
        }
        request.blocks.truncate(request.prompt_blocks);
        let mut sequence = self.new_sequence(&request.blocks);
        if let (Some(windows), true) = (self.windows, request.is_hashed) {
            sequence.set_retention(retention(windows, request.is_pinned));
            sequence.add_prompt_end(request.prompt_end);
            if let Some(upto) = request.write_upto {
                sequence.add_anchor(upto);
            }
        }
        if let Some(hints) = request.hints.clone().filter(|_| request.is_hashed) {
            sequence.set_hints(hints);
        }
        self.requests.insert(id, Request { sequence, ..request });
        Ok(())
    }

    /// Adds a request's further full blocks.
    fn add_blocks(&mut self, id: u64, names: &str) -> Result<&mut Request, Stop> {
        let size = self.block_size;
        let blocks = names::parse(names)?;
        let request = self.request(id)?;
        if !blocks.is_empty() && !request.is_hashed {
            return invalid("names", format!("must be none for request {id}, which is not hashed"));
        }
        extend(&mut request.sequence, &blocks, size);
        request.blocks.extend(blocks);
        Ok(request)
    }

    fn start(&mut self, started: &Started<'_>) -> Result<(), Stop> {
        let &Started { id, tokens, hit, new, .. } = started;
        let size = self.block_size;
        let request = self.add_blocks(id, started.names)?;
        let full = request.blocks.len() * size;
        if request.is_hashed && (tokens < full || tokens - full >= size) {
            return invalid(
                "tokens",
                format!("must be of {} full blocks, not {tokens}", full / size),
            );
        }
        let rest = if request.is_hashed { tokens - full } else { 0 };
        let chunk = started.chunk.unwrap_or(new);
        let taken = self.on_batch(&[id], |cache, batch| {
            cache.commit_in_chunks(&mut *batch[0], hit, new, chunk)
        })?;
        self.rest_queries += rest as u64 * u64::from(taken.is_some());
        match taken {
            Some(taken) if taken == hit => Ok(()),
            Some(taken) => Err(Stop::Differs(format!(
                "request {id} hits {hit} tokens live and {taken} replayed"
            ))),
            None => Err(Stop::Differs(format!(
                "request {id} finds no room for {new} tokens in the replay"
            ))),
        }
    }

    fn take(&mut self, id: u64) -> Result<Request, Stop> {
        self.requests.remove(&id).ok_or_else(|| no_request(id))
    }

    fn take_all(&mut self, ids: &[u64]) -> Result<Vec<Request>, Stop> {
        ids.iter().map(|&id| self.take(id)).collect()
    }

    /// Makes a call with the sequences of requests. One that fails ends the replay.
    fn on_batch<T>(
        &mut self,
        ids: &[u64],
        call: impl FnOnce(&mut PrefixCache<Writer>, &mut [&mut Sequence]) -> Result<T, CacheError>,
    ) -> Result<T, Stop> {
        let mut taken = self.take_all(ids)?;
        let outcome = call(&mut self.cache, &mut sequences(&mut taken))?;
        self.requests.extend(ids.iter().copied().zip(taken));
        Ok(outcome)
    }

    fn give_slots(&mut self, ids: &[u64], upto: &[usize]) -> Result<(), Stop> {
        match self.on_batch(ids, |cache, batch| cache.ensure_slots(batch, upto))? {
            served if served == ids.len() => Ok(()),
            served => Err(Stop::Differs(format!(
                "{} requests get slots live and {served} replayed",
                ids.len()
            ))),
        }
    }

    fn publish(&mut self, ids: &[u64], upto: &[usize], names: &[&str]) -> Result<(), Stop> {
        if names.len() != ids.len() || upto.len() != ids.len() {
            return invalid("upto and names", "must have an entry for each of ids");
        }
        for (&id, names) in ids.iter().zip(names) {
            self.add_blocks(id, names)?;
        }
        let deduplicates = self.deduplicates;
        self.on_batch(ids, |cache, batch| {
            // Sequences of a replay have full blocks alone.
            let known = batch.iter().map(|sequence| sequence.num_tokens());
            let upto: Vec<usize> = known.zip(upto).map(|(most, &upto)| most.min(upto)).collect();
            let duplicates = cache.mark_blocks_filled(batch, &upto)?;
            for one in duplicates.into_iter().filter(|_| deduplicates) {
                cache.replace_block(batch[one.sequence], one.group, one.index)?;
            }
            Ok(())
        })
    }

    fn end(&mut self, ids: &[u64], well: &[bool]) -> Result<(), Stop> {
        if well.len() != ids.len() {
            return invalid("well", "must have an entry for each of ids");
        }
        let mut taken = self.take_all(ids)?;
        if self.windows.is_some_and(|windows| windows.pin) {
            let ended = taken.iter_mut().zip(well);
            let ended = ended.filter(|(request, well)| **well && request.sequence.is_committed());
            let ended: Vec<&mut Sequence> =
                ended.map(|(request, _)| &mut request.sequence).collect();
            self.cache.pin_anchors(&ended)?;
        }
        let mut held: Vec<&mut Sequence> = sequences(&mut taken);
        held.retain(|sequence| sequence.is_committed());
        Ok(self.cache.release(&mut held)?)
    }

    // Size.

    fn move_cached(&mut self, blocks: usize, most: usize, moved: bool) -> Result<(), Stop> {
        self.cache.begin_moves(blocks, most, &mut self.moves)?;
        if self.moves.in_flight().is_empty() {
            return Ok(());
        }
        if moved {
            self.cache.finish_moves(&mut self.moves)?;
        } else {
            let aborted = self.cache.abort_moves(&mut self.moves);
            aborted.map_err(CacheError::from)?;
        }
        Ok(())
    }
}

fn sequences(requests: &mut [Request]) -> Vec<&mut Sequence> {
    requests.iter_mut().map(|request| &mut request.sequence).collect()
}

/// Adds blocks, whose names are what the server's eviction policy went by.
fn extend(sequence: &mut Sequence, blocks: &[u64], block_size: usize) {
    sequence.extend(&tokens_of(blocks, block_size));
    sequence.give_names(blocks);
}

/// Tokens that differ where names do. A block of one token has room for half of a name.
fn tokens_of(names: &[u64], block_size: usize) -> Vec<u32> {
    let mut tokens = vec![0; names.len() * block_size];
    for (block, name) in tokens.chunks_exact_mut(block_size).zip(names) {
        block[0] = *name as u32;
        if let Some(second) = block.get_mut(1) {
            *second = (name >> 32) as u32;
        }
    }
    tokens
}

fn retention(windows: Windows, may_pin: bool) -> Retention {
    let Some(interval) = windows.interval else {
        return Retention::Everything;
    };
    let pins =
        (windows.pin && may_pin).then_some(Pins::new(windows.min_pin_blocks, windows.pin_prefix));
    Retention::Anchors { interval, pins }
}

fn read_hints(owner: &str, hints: &[RecordedHint]) -> Result<Hints, Fault> {
    let ranges = hints.iter().map(hint_of).collect::<Result<_, _>>()?;
    let found = |error: InvalidArgument| Fault::new("hints", error.to_string());
    Hints::new(Owner::named(owner), ranges).map_err(found)
}
