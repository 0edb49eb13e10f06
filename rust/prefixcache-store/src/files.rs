//! The files of a folder: their names, and how they are read and written.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::SystemTime;

use blake3::Hash;
use thiserror::Error;
use twox_hash::XxHash3_128;

use crate::memory::{PAGE, Scratch, is_paged};

const LOCK: &str = "lock";
const PART: &str = "part";
const STAT_BLOCK: u64 = 512;
#[cfg(target_os = "linux")]
const DIRECT: i32 = libc::O_DIRECT;
#[cfg(not(target_os = "linux"))]
const DIRECT: i32 = 0;

/// Why a folder is not used.
#[derive(Debug, Error)]
pub enum OpenError {
    /// Somebody else has it.
    #[error("another process, or another store of this one, uses {}", .0.display())]
    InUse(PathBuf),
    /// Others may read or write what is in it.
    #[error("{} belongs to another user, or can be opened by other users", .0.display())]
    NotPrivate(PathBuf),
    /// What else lies there leaves no room.
    #[error("the bound leaves no room: {0} bytes in the folder are no values")]
    NoRoom(u64),
    /// The system refused it.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Which bytes a value has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    sum: u128,
    pub(crate) len: usize,
}

impl Content {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self { sum: XxHash3_128::oneshot(bytes), len: bytes.len() }
    }

    /// Bytes on the disk, and some for the name and for where the file's parts lie.
    pub(crate) fn room(self) -> u64 {
        (self.len.next_multiple_of(PAGE) + PAGE) as u64
    }

    fn name(self, key: &Hash) -> String {
        format!("{}-{:032x}-{:x}", key.to_hex(), self.sum, self.len)
    }

    fn parse(name: &str) -> Option<(Hash, Self)> {
        let (key, rest) = name.split_once('-')?;
        let (sum, len) = rest.split_once('-')?;
        let key = Hash::from_hex(key).ok()?;
        let sum = u128::from_str_radix(sum, 16).ok()?;
        let content = Self { sum, len: usize::from_str_radix(len, 16).ok()? };
        (content.name(&key) == name).then_some((key, content))
    }
}

/// What lies in a folder.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    /// The values, the one that was used last at the end.
    pub(crate) values: Vec<(SystemTime, Hash, Content)>,
    /// Bytes of all else.
    pub(crate) other_bytes: u64,
}

/// A folder that this process alone uses.
#[derive(Debug)]
pub(crate) struct Files {
    folder: PathBuf,
    /// Whether the file system can read and write past the system's cache.
    is_direct: bool,
    num_parts: AtomicU64,
    _lock: File,
}

impl Files {
    pub(crate) fn open(folder: &Path) -> Result<Self, OpenError> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let folder = folder.canonicalize()?;
        let status = folder.metadata()?;
        // SAFETY: the call touches no memory and cannot fail.
        let user = unsafe { libc::geteuid() };
        if status.uid() != user || status.mode() & 0o077 != 0 {
            return Err(OpenError::NotPrivate(folder));
        }
        let mut options = OpenOptions::new();
        let lock = open(&folder.join(LOCK), options.write(true).create(true).truncate(false), 0)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(OpenError::InUse(folder)),
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
        let mut files = Self { folder, is_direct: true, num_parts: AtomicU64::new(0), _lock: lock };
        files.is_direct = files.can_be_direct().is_ok();
        Ok(files)
    }

    /// Writes a page past the system's cache and reads it.
    fn can_be_direct(&self) -> io::Result<()> {
        let (part, mut scratch) = (self.new_part(), Scratch::default());
        let page = scratch.pages(PAGE);
        let written = self.write(&part, page);
        let read = written.and_then(|()| {
            self.open_for(&part, OpenOptions::new().read(true), page)?.read_exact_at(page, 0)
        });
        remove(&part).and(read)
    }

    /// Opens a file for what is to go from or to `bytes`.
    fn open_for(&self, path: &Path, options: &mut OpenOptions, bytes: &[u8]) -> io::Result<File> {
        open(path, options, if self.is_direct && is_paged(bytes) { DIRECT } else { 0 })
    }

    /// What lies there. Files that were not complete are removed, and those that are not as long as their name says.
    pub(crate) fn list(&self) -> io::Result<Listing> {
        let mut listing =
            Listing { other_bytes: blocks(&self.folder.metadata()?), ..Listing::default() };
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let (path, status) = (entry.path(), entry.metadata()?);
            let value = entry.file_name().to_str().and_then(Content::parse);
            let value = value.filter(|_| status.is_file());
            match value {
                Some((key, content)) if content.len as u64 == status.len() => {
                    listing.values.push((status.modified()?, key, content));
                }
                Some(_) => remove(&path)?,
                None if !status.is_dir() && path.extension().is_some_and(|end| end == PART) => {
                    remove(&path)?;
                }
                None => listing.other_bytes += blocks(&status),
            }
        }
        listing.values.sort_by_key(|(used, key, _)| (*used, *key.as_bytes()));
        Ok(listing)
    }

    /// Reads a value into the beginning of `into`; whether the bytes there are those.
    pub(crate) fn read(&self, key: &Hash, content: Content, into: &mut [u8]) -> io::Result<bool> {
        let file = self.open_for(&self.path(key, content), OpenOptions::new().read(true), into)?;
        let mut len = 0;
        while len < content.len {
            match file.read_at(&mut into[len..], len as u64) {
                Ok(0) => break,
                Ok(count) => len += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let is_sound = len >= content.len && Content::of(&into[..content.len]) == content;
        if is_sound {
            // Without it the value is evicted earlier, after a restart.
            let _ = file.set_modified(SystemTime::now());
        }
        Ok(is_sound)
    }

    /// Where a file is until it is complete.
    pub(crate) fn new_part(&self) -> PathBuf {
        // Relaxed: numbers need only differ.
        self.folder.join(format!("{}.{PART}", self.num_parts.fetch_add(1, Relaxed)))
    }

    pub(crate) fn write(&self, part: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let file = self.open_for(part, options.write(true).create(true).truncate(true), bytes)?;
        file.write_all_at(bytes, 0)?;
        file.set_modified(SystemTime::now())
    }

    /// Where a value is.
    pub(crate) fn path(&self, key: &Hash, content: Content) -> PathBuf {
        self.folder.join(content.name(key))
    }
}

/// Removes a file; one that is not there is.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn blocks(status: &fs::Metadata) -> u64 {
    status.blocks() * STAT_BLOCK
}

fn open(path: &Path, options: &mut OpenOptions, flags: i32) -> io::Result<File> {
    options.mode(0o600).custom_flags(flags | libc::O_NOFOLLOW).open(path)
}
