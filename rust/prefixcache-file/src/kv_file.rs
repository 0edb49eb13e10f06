//! Opening a file, and what its owner may do with it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use prefixcache_core::backing::{BackingStore, KeptBlock};

use crate::both::Both;
use crate::checker::Checker;
use crate::layout::{Layout, OpenError, describe};
use crate::space;
use crate::staging::Staging;
use crate::table::{Kept, Table};

/// Lifetime counts of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks whose records were completed.
    pub kept: u64,
    /// Restored blocks that were read at their first hit and are sound.
    pub checked: u64,
    /// Those that are not, and were dropped.
    pub failed: u64,
    /// Clears that the disk did not take: after a power loss what was cleared can come back.
    pub failed_syncs: u64,
}

/// An open file of KV blocks. The owner has locked it: nobody else writes to it.
#[derive(Debug)]
pub struct KvFile {
    table: Arc<Table>,
    _checker: Option<Checker>,
}

impl KvFile {
    /// Opens a file; an empty one becomes one of this layout. A file with room for more blocks than asked for is
    /// used as it is.
    ///
    /// Fails with the reason why the file is not used. It is unchanged then, unless it was empty.
    pub fn open(file: File, wanted: &Layout) -> Result<Self, OpenError> {
        let mut opened = Self::open_without_thread(file, wanted)?;
        opened._checker = Some(Checker::start(Arc::clone(&opened.table))?);
        Ok(opened)
    }

    pub(crate) fn open_without_thread(file: File, wanted: &Layout) -> Result<Self, OpenError> {
        wanted.check()?;
        if file.metadata()?.len() == 0 {
            create(&file, wanted)?;
        }
        let layout = describe(&file)?;
        let sizes = |one: &Layout| (one.num_tensors, one.block_bytes, one.block_tokens);
        if (layout.digest, sizes(&layout)) != (wanted.digest, sizes(wanted)) {
            return Err(OpenError::OtherLayout);
        }
        if layout.capacity < wanted.capacity {
            return Err(OpenError::TooSmall(layout.capacity));
        }
        space::allocate(&file, 0, layout.table_bytes() as u64)?;
        Ok(Self { table: Arc::new(Table::new(file, layout)?), _checker: None })
    }

    /// What the file is for.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.table.layout
    }

    /// Where a tensor begins in the file, in bytes.
    #[must_use]
    pub fn tensor_at(&self, tensor: u32) -> u64 {
        self.table.layout.tensor_at(tensor)
    }

    /// Gives bytes of the file space on the disk, so that writing to them cannot fail.
    pub fn allocate(&self, at: u64, len: u64) -> io::Result<()> {
        space::allocate(&self.table.file, at, len)
    }

    /// Gives space back. The bytes read as zero.
    pub fn punch(&self, at: u64, len: u64) -> io::Result<()> {
        space::punch(&self.table.file, at, len)
    }

    /// What there is for a pool of `num_blocks` blocks and a cache of `num_groups` groups. Other records are
    /// withdrawn. To be called before [`Self::store`] is in use.
    #[must_use]
    pub fn take_kept(&self, num_blocks: usize, num_groups: u16) -> Kept {
        self.table.take_kept(num_blocks, num_groups)
    }

    /// What a pool reports to.
    #[must_use]
    pub fn store(&self) -> Arc<dyn BackingStore> {
        Arc::<Table>::clone(&self.table)
    }

    /// What a pool reports to of which evicted blocks go to `staging` too, those `kept` from another process as well.
    #[must_use]
    pub fn store_with(&self, staging: &Staging, kept: &[KeptBlock]) -> Arc<dyn BackingStore> {
        Arc::new(Both::new(Arc::clone(&self.table), staging.clone(), kept))
    }

    /// Blocks with a valid record, and those of them whose bytes are not those of the record, where it `reads` them.
    #[must_use]
    pub fn survey(&self, reads: bool) -> (u64, u64) {
        self.table.survey(reads)
    }

    /// Restored blocks that are being read because a hit needs them. From any thread.
    #[must_use]
    pub fn num_asked(&self) -> usize {
        self.table.num_asked()
    }

    /// Lifetime counts. From any thread.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let counters = &self.table.counters;
        Counts {
            kept: counters.kept.load(Relaxed),
            checked: counters.checked.load(Relaxed),
            failed: counters.failed.load(Relaxed),
            failed_syncs: counters.failed_syncs.load(Relaxed),
        }
    }

    #[cfg(test)]
    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    #[cfg(test)]
    pub(crate) fn table_mut(&mut self) -> Option<&mut Table> {
        Arc::get_mut(&mut self.table)
    }
}

fn create(file: &File, layout: &Layout) -> io::Result<()> {
    file.set_len(layout.file_bytes())?;
    space::allocate(file, 0, layout.table_bytes() as u64)?;
    file.write_all_at(&layout.to_header()[..], 0)
}
