//! Block tables as the attention kernels read them: compressed rows in buffers of the caller.

use super::{PrefixCache, check_len};
use crate::error::{Argument, CacheError, InvalidArgument, require};
use crate::id::{BlockId, GroupId};
use crate::sequence::Sequence;
use crate::store::Lookup;

/// The caller's buffers for the tables of one group. S sequences, T computed tokens, all together.
#[derive(Debug)]
pub struct TableBuffers<'a> {
    /// S + 1 entries: where each sequence's pages begin in `indices`.
    pub indptr: &'a mut [i32],
    /// At least as many entries as the sequences have pages.
    pub indices: &'a mut [i32],
    /// S entries: tokens on each sequence's last page.
    pub last_page_len: &'a mut [i32],
    /// T entries: where each computed token's KV goes, as block * block_size + offset.
    pub slot_mapping: &'a mut [i64],
    /// S entries: how many pages of each sequence are left out before its first, as no computed token
    /// needs them.
    pub first_pages: Option<&'a mut [i32]>,
}

/// The part of a sequence that a step computes: positions from `start` to `end`.
#[derive(Clone, Copy)]
struct Span {
    start: usize,
    end: usize,
    /// The first page that the tokens from `start` on need.
    first_page: usize,
}

impl<S: Lookup> PrefixCache<S> {
    /// Writes, for each sequence, the pages that hold what its `counts[i]` computed tokens from `starts[i]`
    /// on attend to, and the slot of each of these tokens. Returns the number of pages written.
    ///
    /// Under full attention these are the pages of all positions up to `starts[i] + counts[i]`. Of a group
    /// with a window the pages behind it are left out: attention that knows positions only relative to
    /// the last (FlashInfer) takes the shorter table as it is; a kernel that cuts positions into tiles
    /// from the sequence's first token on (the CPU's) has to add `first_pages[i] * block_size`.
    pub fn fill_block_tables(
        &self,
        sequences: &[&Sequence],
        starts: &[usize],
        counts: &[usize],
        group: GroupId,
        buffers: &mut TableBuffers<'_>,
    ) -> Result<usize, CacheError> {
        self.check_group(group)?;
        let spans = self.spans(sequences, starts, counts, group)?;
        self.check_buffers(&spans, buffers)?;
        let (mut page, mut slot) = (0, 0);
        buffers.indptr[0] = 0;
        for (row, (sequence, span)) in sequences.iter().zip(&spans).enumerate() {
            let table = sequence.block_table(group.index());
            let pages = self.num_pages(*span);
            let held = &table[span.first_page..][..pages];
            copy_ids(held, &mut buffers.indices[page..page + pages]);
            if let Some(first_pages) = &mut buffers.first_pages {
                first_pages[row] = span.first_page as i32;
            }
            page += pages;
            buffers.indptr[row + 1] = page as i32;
            buffers.last_page_len[row] = self.last_page_len(*span);
            let count = span.end - span.start;
            self.write_slots(table, *span, &mut buffers.slot_mapping[slot..slot + count]);
            slot += count;
        }
        Ok(page)
    }

    fn spans(
        &self,
        sequences: &[&Sequence],
        starts: &[usize],
        counts: &[usize],
        group: GroupId,
    ) -> Result<Vec<Span>, CacheError> {
        let spec = self.group_spec(group);
        check_len("starts", starts.len(), sequences.len())?;
        check_len("counts", counts.len(), sequences.len())?;
        let rows = sequences.iter().zip(starts).zip(counts).enumerate();
        rows.map(|(row, ((sequence, &start), &count))| {
            self.check_owner(sequence, Argument::element("sequences", row))?;
            let table = sequence.block_table(group.index());
            let slots = sequence.num_ready_slots();
            let Some(end) = start.checked_add(count).filter(|&end| end <= slots) else {
                let reason = format!("plus starts[{row}] must be at most {slots}, its slots");
                return Err(InvalidArgument::new(Argument::element("counts", row), reason).into());
            };
            let first_page = spec.first_needed(start, self.block_size());
            let first_held = sequence.first_held(group);
            let are_held = first_page >= first_held || start >= end;
            require(are_held, Argument::element("starts", row), || {
                format!("must not need blocks before {first_held}: they were dropped")
            })?;
            // Where gaps may be: what is read before the first token, and written after the last.
            let at_ends = [start.saturating_sub(1), end.saturating_sub(1)];
            let is_missing = |&at: &usize| table[at / self.block_size()].is_null();
            let mut read_and_written = at_ends[usize::from(start == 0)..].iter();
            let lacks_some = spec.has_gaps() && start < end && read_and_written.any(is_missing);
            require(!lacks_some, Argument::element("counts", row), || {
                "must begin and end where the sequence has blocks, which `ensure_slots` up \
                 to the end gives"
            })?;
            Ok(Span { start, end, first_page })
        })
        .collect()
    }

    fn check_buffers(
        &self,
        spans: &[Span],
        buffers: &TableBuffers<'_>,
    ) -> Result<(), InvalidArgument> {
        let pages = spans.iter().map(|span| self.num_pages(*span)).sum();
        let tokens = spans.iter().map(|span| span.end - span.start).sum();
        check_room("indptr", buffers.indptr.len(), spans.len() + 1)?;
        check_room("indices", buffers.indices.len(), pages)?;
        check_room("last_page_len", buffers.last_page_len.len(), spans.len())?;
        check_room("slot_mapping", buffers.slot_mapping.len(), tokens)?;
        match &buffers.first_pages {
            Some(first_pages) => check_room("first_pages", first_pages.len(), spans.len()),
            None => Ok(()),
        }
    }

    fn num_pages(&self, span: Span) -> usize {
        let end = span.end.div_ceil(self.block_size());
        end.saturating_sub(span.first_page)
    }

    fn last_page_len(&self, span: Span) -> i32 {
        match span.end.checked_sub(1) {
            Some(last) if self.num_pages(span) > 0 => (last % self.block_size()) as i32 + 1,
            _ => 0,
        }
    }

    fn write_slots(&self, table: &[BlockId], span: Span, out: &mut [i64]) {
        let size = self.block_size();
        for (place, position) in out.iter_mut().zip(span.start..span.end) {
            let block = i64::from(table[position / size].get());
            *place = block * size as i64 + (position % size) as i64;
        }
    }
}

fn copy_ids(blocks: &[BlockId], out: &mut [i32]) {
    for (place, block) in out.iter_mut().zip(blocks) {
        *place = block.get() as i32;
    }
}

fn check_room(argument: &'static str, len: usize, needed: usize) -> Result<(), InvalidArgument> {
    require(len >= needed, argument, || format!("must have room for {needed} entries, not {len}"))
}
