//! The values: which are there, which was used last, and what they take of the bound.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use blake3::Hash;
use lru::LruCache;

use crate::files::{Content, Files, OpenError, remove};
use crate::memory::{Memory, Scratch};
use crate::workers::{Job, Outcome, Ticket, Workers, lock};

/// Lifetime counts of values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Read in time, and what was put.
    pub hits: u64,
    /// Asked for and not there.
    pub misses: u64,
    /// Not read or written in time.
    pub late: u64,
    /// Of other bytes than were put.
    pub damaged: u64,
    /// Not read or written because the disk or the bound refused it.
    pub failed: u64,
    /// Written.
    pub written: u64,
    /// Removed for others.
    pub evicted: u64,
}

/// Values by key in files of a folder. Any thread.
pub struct Store {
    shared: Arc<Shared>,
    readers: Workers,
    writers: Workers,
}

struct Shared {
    files: Files,
    bound: u64,
    /// Who gives a file its last name, or removes one, has this until the state says so too.
    names: Mutex<()>,
    state: Mutex<State>,
    counters: Mutex<Counts>,
}

/// A value with a file.
#[derive(Clone, Copy, Debug)]
struct Entry {
    content: Content,
    /// It is not to be found: its file could not be removed, which is tried again when its room is needed.
    is_lost: bool,
}

impl Entry {
    fn new(content: Content) -> Self {
        Self { content, is_lost: false }
    }
}

struct State {
    values: LruCache<Hash, Entry>,
    /// Of all that lies in the folder, and of what is being written.
    num_bytes: u64,
}

impl State {
    fn peek(&self, key: &Hash) -> Option<Content> {
        let entry = self.values.peek(key).filter(|entry| !entry.is_lost)?;
        Some(entry.content)
    }
}

impl Store {
    /// Opens a folder, which is made where there is none, for at most `bound` bytes.
    ///
    /// `num_threads` of them read, and as many write.
    pub fn open(folder: &Path, bound: u64, num_threads: usize) -> Result<Self, OpenError> {
        let files = Files::open(folder)?;
        let listing = files.list()?;
        let mut state = State { values: LruCache::unbounded(), num_bytes: listing.other_bytes };
        let mut earlier = Vec::new();
        for (_, key, content) in listing.values {
            state.num_bytes += content.room();
            let replaced = state.values.put(key, Entry::new(content));
            earlier.extend(replaced.map(|entry| (key, entry.content)));
        }
        let shared = Shared {
            files,
            bound,
            names: Mutex::default(),
            state: Mutex::new(state),
            counters: Mutex::default(),
        };
        for (key, content) in earlier {
            shared.delete(&key, content)?;
        }
        if !shared.make_room(0)? {
            return Err(OpenError::NoRoom(listing.other_bytes));
        }
        Ok(Self {
            shared: Arc::new(shared),
            readers: Workers::start("store-read", num_threads)?,
            writers: Workers::start("store-write", num_threads)?,
        })
    }

    /// The most bytes on the disk.
    #[must_use]
    pub fn bound(&self) -> u64 {
        self.shared.bound
    }

    /// Bytes on the disk, and of values that are being written.
    #[must_use]
    pub fn num_bytes(&self) -> u64 {
        self.shared.state().num_bytes
    }

    /// How many values there are.
    #[must_use]
    pub fn num_values(&self) -> usize {
        self.shared.state().values.len()
    }

    /// Lifetime counts.
    #[must_use]
    pub fn counts(&self) -> Counts {
        *lock(&self.shared.counters)
    }

    /// Which values are there, as far as memory says.
    pub fn contains<K: AsRef<[u8]>>(&self, keys: &[K]) -> Vec<bool> {
        let state = self.shared.state();
        keys.iter().map(|key| state.peek(&digest(key)).is_some()).collect()
    }

    /// Counts values as used now, until the folder is opened again.
    pub fn touch<K: AsRef<[u8]>>(&self, keys: &[K]) {
        let mut state = self.shared.state();
        for key in keys {
            state.values.promote(&digest(key));
        }
    }

    /// Keeps values; which are kept when it returns, `timeout` from now at the latest.
    ///
    /// The owner of a source lives until its bytes are read, which may be later.
    pub fn put<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        sources: Vec<Memory>,
        timeout: Option<Duration>,
    ) -> Vec<bool> {
        let job = |(key, source): (&K, Memory)| {
            let (shared, key) = (Arc::clone(&self.shared), digest(key));
            Box::new(move |_: &mut Scratch, ticket: &Ticket| shared.put(key, &source, ticket))
                as Job
        };
        let jobs = keys.iter().zip(sources).map(job).collect();
        let outcomes = self.writers.run(jobs, timeout);
        self.shared.count(|counts| counts.late += num_late(&outcomes));
        outcomes.into_iter().map(|outcome| outcome == Outcome::Done).collect()
    }

    /// Reads values into `targets`, which do not overlap; which of these hold theirs now.
    ///
    /// With a `timeout` it returns by then whatever the disk does, and no target is written to later.
    pub fn get_into<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        targets: Vec<Memory>,
        timeout: Option<Duration>,
    ) -> Vec<bool> {
        let mut are_hits = vec![false; keys.len()];
        let (mut places, mut jobs) = (Vec::new(), Vec::<Job>::new());
        for (place, (key, target)) in keys.iter().zip(targets).enumerate() {
            let key = digest(key);
            let Some(content) = self.shared.use_value(&key, |content| content.len == target.len())
            else {
                continue;
            };
            let shared = Arc::clone(&self.shared);
            places.push(place);
            jobs.push(match timeout {
                None => Box::new(move |_, ticket| {
                    // SAFETY: without a timeout the call waits for the job.
                    unsafe { shared.read(key, content, &target, ticket) }
                }),
                Some(_) => Box::new(move |scratch, ticket| {
                    shared.read_in_time(key, content, &target, scratch, ticket);
                }),
            });
        }
        let outcomes = self.readers.run(jobs, timeout);
        self.shared.count(|counts| {
            counts.late += num_late(&outcomes);
            counts.misses += (keys.len() - places.len()) as u64;
        });
        for (place, outcome) in places.into_iter().zip(outcomes) {
            are_hits[place] = outcome == Outcome::Done;
        }
        are_hits
    }

    /// Forgets values. Fails where the disk refuses it; the value is not found then either.
    pub fn remove<K: AsRef<[u8]>>(&self, keys: &[K]) -> io::Result<()> {
        keys.iter().try_for_each(|key| self.shared.forget(&digest(key), None))
    }

    /// Forgets all values.
    pub fn clear(&self) -> io::Result<()> {
        let keys: Vec<_> = self.shared.state().values.iter().map(|(key, _)| *key).collect();
        keys.iter().try_for_each(|key| self.shared.forget(key, None))
    }
}

fn digest<K: AsRef<[u8]>>(key: &K) -> Hash {
    blake3::hash(key.as_ref())
}

fn num_late(outcomes: &[Outcome]) -> u64 {
    outcomes.iter().filter(|outcome| **outcome == Outcome::Late).count() as u64
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn count(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut lock(&self.counters));
    }

    /// The value that is there, if it `is_meant`. It counts as used.
    fn use_value(&self, key: &Hash, is_meant: impl Fn(&Content) -> bool) -> Option<Content> {
        let mut state = self.state();
        let content = state.peek(key).filter(is_meant)?;
        state.values.promote(key);
        Some(content)
    }

    /// Removes the file of a value that nobody finds any more.
    fn delete(&self, key: &Hash, content: Content) -> io::Result<()> {
        remove(&self.files.path(key, content))?;
        self.state().num_bytes -= content.room();
        Ok(())
    }

    /// Forgets a value; where `content` is given only if it is that.
    fn forget(&self, key: &Hash, content: Option<Content>) -> io::Result<()> {
        let _names = lock(&self.names);
        let Some(here) = self.state().values.peek(key).map(|entry| entry.content) else {
            return Ok(());
        };
        if content.is_some_and(|content| content != here) {
            return Ok(());
        }
        self.state().values.pop(key);
        self.delete(key, here).inspect_err(|_| {
            self.state().values.put(*key, Entry { content: here, is_lost: true });
        })
    }

    /// Reserves room, for which it evicts values; whether there is so much.
    fn make_room(&self, room: u64) -> io::Result<bool> {
        let _names = lock(&self.names);
        loop {
            let mut state = self.state();
            if state.num_bytes + room <= self.bound {
                state.num_bytes += room;
                return Ok(true);
            }
            let Some((key, entry)) = state.values.pop_lru() else {
                return Ok(false);
            };
            drop(state);
            self.delete(&key, entry.content).inspect_err(|_| {
                self.state().values.put(key, entry);
            })?;
            self.count(|counts| counts.evicted += 1);
        }
    }

    fn put(&self, key: Hash, source: &Memory, ticket: &Ticket) {
        let content = Content::of(source.bytes());
        if self.use_value(&key, |here| *here == content).is_some() {
            ticket.finish(|| {});
        } else if content.room() > self.bound || !self.make_room(content.room()).unwrap_or(false) {
            self.count(|counts| counts.failed += 1);
        } else {
            self.write(key, content, source, ticket);
        }
    }

    /// Writes a value for which there is room.
    fn write(&self, key: Hash, content: Content, source: &Memory, ticket: &Ticket) {
        let (part, path) = (self.files.new_part(), self.files.path(&key, content));
        let written = self.files.write(&part, source.bytes());
        let _names = lock(&self.names);
        let written = written.and_then(|()| std::fs::rename(&part, &path));
        let mut earlier = None;
        let insert = || earlier = self.state().values.put(key, Entry::new(content));
        let is_failed = written.is_err();
        if !is_failed && ticket.finish(insert) {
            self.count(|counts| counts.written += 1);
            match earlier.map(|entry| entry.content) {
                // One file has taken the other's place.
                Some(same) if same == content => self.state().num_bytes -= content.room(),
                Some(other) => drop(self.delete(&key, other)),
                None => {}
            }
            return;
        }
        self.count(|counts| counts.failed += u64::from(is_failed));
        let is_of_other = !is_failed && self.state().peek(&key) == Some(content);
        let leftover = if is_failed { &part } else { &path };
        // What cannot be removed counts as long as the folder is open.
        if is_of_other || remove(leftover).is_ok() {
            self.state().num_bytes -= content.room();
        }
    }

    /// # Safety
    ///
    /// The call that has the target waits until this returns.
    unsafe fn read(&self, key: Hash, content: Content, target: &Memory, ticket: &Ticket) {
        // SAFETY: as above.
        let into = unsafe { target.bytes_mut() };
        if self.read_file(&key, content, into) {
            ticket.finish(|| self.count(|counts| counts.hits += 1));
        }
    }

    fn read_in_time(
        &self,
        key: Hash,
        content: Content,
        target: &Memory,
        scratch: &mut Scratch,
        ticket: &Ticket,
    ) {
        let bytes = scratch.pages(content.len);
        if self.read_file(&key, content, bytes) {
            ticket.finish(|| {
                // SAFETY: the call waits while the job finishes.
                unsafe { target.bytes_mut() }.copy_from_slice(&bytes[..content.len]);
                self.count(|counts| counts.hits += 1);
            });
        }
    }

    /// Whether a value was read. One that is not sound is removed.
    fn read_file(&self, key: &Hash, content: Content, into: &mut [u8]) -> bool {
        let read = self.files.read(key, content, into);
        match &read {
            Ok(true) => {}
            Ok(false) => self.count(|counts| counts.damaged += 1),
            // It was evicted meanwhile, or somebody has removed it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.count(|counts| counts.misses += 1)
            }
            Err(_) => self.count(|counts| counts.failed += 1),
        }
        let is_lost = |error: &io::Error| {
            error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::EIO)
        };
        if read.as_ref().map_or_else(is_lost, |is_sound| !is_sound) {
            // What cannot be removed counts as long as the folder is open.
            let _ = self.forget(key, Some(content));
        }
        read.unwrap_or(false)
    }
}
