//! Where the step's tokens stand: checked once a step, used by every layer.

use std::ops::Range;

use crate::Attention;

/// The page of the null block: of states nothing is written there.
pub const NO_PAGE: usize = 0;

/// Query rows (tokens times heads of a group) that one task takes through the keys together.
const TASK_ROWS: usize = 128;

/// The block tables of a step, in compressed rows.
///
/// Rows `qo_indptr[s]..qo_indptr[s + 1]` of the queries are the last tokens of sequence s, whose
/// pages are `kv_indices[kv_indptr[s]..kv_indptr[s + 1]]`; the last page holds `last_page_len[s]`
/// tokens. Pages behind the window of every query may be left out at the front: `first_pages[s]` is
/// their number, 0 without it.
#[derive(Clone, Copy, Debug)]
pub struct BlockTables<'a> {
    /// `[S + 1]`
    pub qo_indptr: &'a [i32],
    /// `[S + 1]`
    pub kv_indptr: &'a [i32],
    /// At least `kv_indptr[S]` pages.
    pub kv_indices: &'a [i32],
    /// `[S]`
    pub last_page_len: &'a [i32],
    /// `[S]`
    pub first_pages: Option<&'a [i32]>,
}

/// The block tables do not describe a step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// An array is too short or too long for the number of sequences.
    #[error("{0} has the wrong length")]
    Length(&'static str),
    /// Offsets start at 0 and never fall.
    #[error("{0} must start at 0 and never fall")]
    Offsets(&'static str),
    /// A page that the cache does not have.
    #[error("kv_indices holds page {0}; the cache has {1}")]
    Page(i32, usize),
    /// A last page that is empty or overfull.
    #[error("last_page_len holds {0}; a page holds 1 to {1} tokens")]
    LastPage(i32, usize),
    /// A negative number of pages.
    #[error("first_pages holds {0}; it counts pages that are left out")]
    FirstPage(i32),
    /// A page that a query sees is left out.
    #[error(
        "first_pages leaves out {1} pages of sequence {0}, whose queries see keys from position {2} on"
    )]
    LeftOut(usize, usize, usize),
    /// A sequence with more tokens than can be counted.
    #[error("sequence {0} has more tokens in its pages than can be counted")]
    TooLong(usize),
    /// A sequence with more queries than tokens.
    #[error("sequence {0} has more queries than tokens in its pages")]
    Queries(usize),
}

/// A checked step: its sequences, and the tasks that their queries are cut into.
#[derive(Clone, Debug)]
pub struct Plan {
    attention: Attention,
    pages: Vec<usize>,
    sequences: Vec<Sequence>,
    tasks: Vec<Task>,
    num_queries: usize,
    num_pages: usize,
    block_size: usize,
    writes_apart: bool,
}

#[derive(Clone, Debug)]
struct Sequence {
    pages: Range<usize>,
    /// Pages before these that are left out.
    first_page: usize,
    queries: Range<usize>,
    /// Position of the first query.
    start: usize,
}

/// Rows of one sequence that pass its state.
pub(crate) struct Run {
    /// Its number.
    pub(crate) sequence: usize,
    pub(crate) rows: Range<usize>,
    /// Position of the first of them.
    pub(crate) start: usize,
    /// The first row whose state is not kept.
    pub(crate) kept: usize,
}

/// A run of one sequence's queries.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    /// Its number.
    pub(crate) sequence: usize,
    /// Rows of the query matrix.
    pub(crate) queries: Range<usize>,
    /// Position of the first of them.
    pub(crate) start: usize,
}

impl Plan {
    /// Checks the tables of a step over a cache of `num_pages` pages of `block_size` tokens.
    ///
    /// # Errors
    /// The tables name what the cache does not have, or contradict each other.
    pub fn new(
        tables: BlockTables<'_>,
        num_pages: usize,
        block_size: usize,
        attention: &Attention,
    ) -> Result<Self, PlanError> {
        let count = tables.last_page_len.len();
        let queries = offsets("qo_indptr", tables.qo_indptr, count)?;
        let pages = offsets("kv_indptr", tables.kv_indptr, count)?;
        let used = tables.kv_indices.get(..pages[count]).ok_or(PlanError::Length("kv_indices"))?;
        if tables.first_pages.is_some_and(|pages| pages.len() != count) {
            return Err(PlanError::Length("first_pages"));
        }
        let sequences: Vec<_> = (0..count)
            .map(|s| {
                let (queries, pages) = (queries[s]..queries[s + 1], pages[s]..pages[s + 1]);
                Sequence::new(s, &tables, queries, pages, block_size, attention)
            })
            .collect::<Result<_, _>>()?;
        let pages: Vec<_> =
            used.iter().map(|&page| checked_page(page, num_pages)).collect::<Result<_, _>>()?;
        Ok(Self {
            attention: *attention,
            writes_apart: write_apart(&sequences, &pages, block_size),
            pages,
            tasks: tasks(&sequences, attention),
            sequences,
            num_queries: queries[count],
            num_pages,
            block_size,
        })
    }

    /// The attention that the plan was made for.
    pub fn attention(&self) -> &Attention {
        &self.attention
    }

    /// Rows of the query matrix.
    pub fn num_queries(&self) -> usize {
        self.num_queries
    }

    /// Pages of the cache that the plan was made for.
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Tokens of a page.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Whether each page that tokens of the step are written to is of one sequence alone, also where the token
    /// before them is read. [`NO_PAGE`] is of none, and no token is read from it.
    pub fn writes_apart(&self) -> bool {
        self.writes_apart
    }

    /// Whether the sequences are those of another plan, with other pages.
    pub fn has_sequences_of(&self, other: &Self) -> bool {
        let same = |(a, b): (&Sequence, &Sequence)| a.queries == b.queries && a.start == b.start;
        self.block_size == other.block_size
            && self.sequences.len() == other.sequences.len()
            && self.sequences.iter().zip(&other.sequences).all(same)
    }

    /// Whether sequences have as many rows as `guesses` \[S\] says of each; there are none where that is empty.
    pub fn has_guesses(&self, guesses: &[usize]) -> bool {
        let all = || self.sequences.iter().zip(guesses);
        guesses.is_empty()
            || guesses.len() == self.sequences.len()
                && all().all(|(one, &guesses)| guesses <= one.queries.len())
    }

    /// The rows of all guesses, which are the last `guesses` \[S\] of each sequence; none where that is empty.
    pub fn guessed_rows(&self, guesses: &[usize]) -> impl Iterator<Item = usize> {
        let runs = self.runs(guesses).into_iter();
        runs.flat_map(|run| run.kept..run.rows.end)
    }

    /// The rows of each sequence, the last `guesses` \[S\] of which are guesses; none where that is empty.
    pub(crate) fn runs(&self, guesses: &[usize]) -> Vec<Run> {
        assert!(self.has_guesses(guesses), "guesses");
        let runs = self.sequences.iter().enumerate().map(|(sequence, one)| {
            let guesses = guesses.get(sequence).copied().unwrap_or(0);
            Run {
                sequence,
                rows: one.queries.clone(),
                start: one.start,
                kept: one.queries.end - guesses,
            }
        });
        runs.collect()
    }

    /// The first `accepted` \[S\] of the guesses of each sequence, where rows are those of the guesses alone.
    pub(crate) fn accepted_runs(&self, guesses: &[usize], accepted: &[usize]) -> Vec<Run> {
        assert_eq!(guesses.len(), accepted.len(), "accepted guesses");
        let mut first = 0;
        let runs = self.runs(guesses).into_iter().zip(guesses).zip(accepted);
        let runs = runs.map(|((run, guesses), accepted)| {
            assert!(accepted <= guesses, "accepted guesses of a sequence");
            let rows = first..first + accepted;
            first += guesses;
            Run { kept: rows.end, start: run.start + run.kept - run.rows.start, rows, ..run }
        });
        runs.filter(|run| !run.rows.is_empty()).collect()
    }

    pub(crate) fn tasks(&self) -> &[Task] {
        &self.tasks
    }

    /// The page, and the token's number in it, of a position of a sequence.
    #[inline(always)]
    pub(crate) fn place(&self, sequence: usize, position: usize) -> (usize, usize) {
        let sequence = &self.sequences[sequence];
        let pages = &self.pages[sequence.pages.clone()];
        (pages[position / self.block_size - sequence.first_page], position % self.block_size)
    }

    /// The sequence of a row of the query matrix, the row's position in it, and how many rows of the
    /// sequence come before it in the step.
    pub(crate) fn row(&self, row: usize) -> (usize, usize, usize) {
        let number = self.sequence_of(row);
        let sequence = &self.sequences[number];
        let own = row - sequence.queries.start;
        (number, sequence.start + own, own)
    }

    /// Where the rows of a row's sequence end.
    pub(crate) fn end_of(&self, row: usize) -> usize {
        self.sequences[self.sequence_of(row)].queries.end
    }

    fn sequence_of(&self, row: usize) -> usize {
        self.sequences.partition_point(|one| one.queries.end <= row)
    }
}

fn offsets(name: &'static str, offsets: &[i32], count: usize) -> Result<Vec<usize>, PlanError> {
    if offsets.len() != count + 1 {
        return Err(PlanError::Length(name));
    }
    if offsets[0] != 0 || !offsets.is_sorted() {
        return Err(PlanError::Offsets(name));
    }
    Ok(offsets.iter().map(|&offset| offset as usize).collect())
}

fn checked_page(page: i32, num_pages: usize) -> Result<usize, PlanError> {
    let found = usize::try_from(page).ok().filter(|&page| page < num_pages);
    found.ok_or(PlanError::Page(page, num_pages))
}

impl Sequence {
    fn new(
        s: usize,
        tables: &BlockTables<'_>,
        queries: Range<usize>,
        pages: Range<usize>,
        block_size: usize,
        attention: &Attention,
    ) -> Result<Self, PlanError> {
        let first_page = tables.first_pages.map_or(0, |first_pages| first_pages[s]);
        let first_page =
            usize::try_from(first_page).map_err(|_| PlanError::FirstPage(first_page))?;
        let last_page_len = tables.last_page_len[s];
        let last =
            usize::try_from(last_page_len).ok().filter(|last| (1..=block_size).contains(last));
        let last = last.ok_or(PlanError::LastPage(last_page_len, block_size))?;
        let tokens = match pages.len().checked_sub(1) {
            None => 0,
            Some(full) => (first_page.checked_add(full))
                .and_then(|full| full.checked_mul(block_size))
                .and_then(|full| full.checked_add(last))
                .ok_or(PlanError::TooLong(s))?,
        };
        let start = tokens.checked_sub(queries.len()).ok_or(PlanError::Queries(s))?;
        let first_seen = attention.first_seen(start);
        if !queries.is_empty() && first_page > first_seen / block_size {
            return Err(PlanError::LeftOut(s, first_page, first_seen));
        }
        Ok(Self { pages, first_page, queries, start })
    }
}

/// See [`Plan::writes_apart`].
fn write_apart(sequences: &[Sequence], pages: &[usize], block_size: usize) -> bool {
    let (mut written, mut read) = (Vec::new(), Vec::new());
    for (number, sequence) in sequences.iter().enumerate() {
        if sequence.queries.is_empty() {
            continue;
        }
        let page = |block: usize| pages[sequence.pages.start + block - sequence.first_page];
        let blocks = sequence.start / block_size..sequence.pages.len() + sequence.first_page;
        written.extend(blocks.map(|block| (page(block), number)));
        let before = sequence.start.checked_sub(1).map(|before| before / block_size);
        // It may be left out where nothing is seen of it.
        if let Some(before) = before.filter(|&before| before >= sequence.first_page) {
            read.push((page(before), number));
        }
    }
    written.sort_unstable();
    let of_another = |&(page, number): &(usize, usize)| {
        let first = written.partition_point(|one| one.0 < page);
        written.get(first).is_some_and(|one| one.0 == page && one.1 != number)
    };
    let is_apart = |two: &[(usize, usize)]| two[0].0 != two[1].0 || two[0].0 == NO_PAGE;
    let reads_none = read.iter().any(|one| one.0 == NO_PAGE);
    written.windows(2).all(is_apart) && !reads_none && !read.iter().any(of_another)
}

/// Cuts each sequence into runs of `length` queries, those with the most keys first, so that no
/// thread is left with a long one at the end.
fn tasks(sequences: &[Sequence], attention: &Attention) -> Vec<Task> {
    let length = (TASK_ROWS / attention.group()).max(1);
    let mut tasks = Vec::new();
    for (number, sequence) in sequences.iter().enumerate() {
        for first in sequence.queries.clone().step_by(length) {
            let queries = first..(first + length).min(sequence.queries.end);
            let start = sequence.start + (first - sequence.queries.start);
            tasks.push(Task { sequence: number, queries, start });
        }
    }
    tasks.sort_by_key(|task| {
        let keys = task.start + task.queries.len() - attention.first_seen(task.start);
        std::cmp::Reverse(keys.saturating_mul(task.queries.len()))
    });
    tasks
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: BlockTables<'_> = BlockTables {
        qo_indptr: &[0, 3, 4],
        kv_indptr: &[0, 2, 3],
        kv_indices: &[4, 1, 2, 99],
        last_page_len: &[1, 16],
        first_pages: None,
    };

    /// Three query heads that share a key-value head.
    fn attention(window_left: Option<usize>) -> Attention {
        let full = Attention::new(3, 1, 16, 1.0).expect("a shape that fits");
        Attention { window_left, ..full }
    }

    fn plan(tables: BlockTables<'_>) -> Result<Plan, PlanError> {
        Plan::new(tables, 5, 16, &attention(None))
    }

    #[test]
    fn queries_are_the_last_tokens() {
        let plan = plan(GOOD).expect("good tables");
        let mut starts: Vec<_> = plan.tasks.iter().map(|t| (t.sequence, t.start)).collect();
        starts.sort_unstable();
        assert_eq!(starts, [(0, 14), (1, 15)]);
        let task = plan.tasks.iter().find(|t| t.sequence == 0).expect("a task");
        assert_eq!(
            [14, 15, 16].map(|position| plan.place(task.sequence, position)),
            [(4, 14), (4, 15), (1, 0)]
        );
    }

    #[test]
    fn tables_that_lie_are_refused() {
        type Change<'a> = (&'a dyn Fn(&mut BlockTables<'static>), PlanError);
        let changes: [Change<'_>; 11] = [
            (&|t| t.qo_indptr = &[0, 3], PlanError::Length("qo_indptr")),
            (&|t| t.kv_indptr = &[0, 2, 5], PlanError::Length("kv_indices")),
            (&|t| t.kv_indptr = &[0, 2, 1], PlanError::Offsets("kv_indptr")),
            (&|t| t.qo_indptr = &[1, 3, 4], PlanError::Offsets("qo_indptr")),
            (&|t| t.kv_indices = &[4, 5, 2], PlanError::Page(5, 5)),
            (&|t| t.kv_indices = &[4, -1, 2], PlanError::Page(-1, 5)),
            (&|t| t.last_page_len = &[0, 16], PlanError::LastPage(0, 16)),
            (&|t| t.qo_indptr = &[0, 3, 20], PlanError::Queries(1)),
            (&|t| t.first_pages = Some(&[0]), PlanError::Length("first_pages")),
            (&|t| t.first_pages = Some(&[0, -1]), PlanError::FirstPage(-1)),
            (&|t| t.first_pages = Some(&[0, 1]), PlanError::LeftOut(1, 1, 0)),
        ];
        for (change, error) in changes {
            let mut tables = GOOD;
            change(&mut tables);
            assert_eq!(plan(tables).expect_err("a lie"), error);
        }
    }

    #[test]
    fn positions_count_the_pages_that_are_left_out() {
        let mut tables = GOOD;
        tables.first_pages = Some(&[2, 0]);
        // The first query of sequence 0 is at 46 and sees keys from 32 on: page 2, the first listed.
        let plan = Plan::new(tables, 5, 16, &attention(Some(14))).expect("good tables");
        let task = plan.tasks.iter().find(|t| t.sequence == 0).expect("a task");
        assert_eq!(task.start, 46);
        assert_eq!([32, 48].map(|position| plan.place(task.sequence, position)), [(4, 0), (1, 0)]);
        let wider = Plan::new(tables, 5, 16, &attention(Some(15)));
        assert_eq!(wider.expect_err("a lie"), PlanError::LeftOut(0, 2, 31));
    }

    #[test]
    fn a_sequence_without_queries_sees_nothing_that_is_left_out() {
        let mut tables = GOOD;
        tables.qo_indptr = &[0, 0, 1];
        tables.first_pages = Some(&[i32::MAX, 0]);
        assert!(plan(tables).is_ok());
    }

    #[test]
    fn costly_tasks_are_those_that_see_many_keys() {
        let tables = BlockTables {
            qo_indptr: &[0, 20, 60],
            kv_indptr: &[0, 8, 11],
            kv_indices: &[0; 11],
            last_page_len: &[16, 16],
            first_pages: None,
        };
        let first = |window_left| {
            let plan = Plan::new(tables, 5, 16, &attention(window_left)).expect("good tables");
            plan.tasks()[0].sequence
        };
        assert_eq!([first(None), first(Some(9))], [0, 1]);
    }

    #[test]
    fn more_tokens_than_can_be_counted_are_refused() {
        let mut tables = GOOD;
        tables.kv_indptr = &[0, 1, 3];
        tables.last_page_len = &[16, 16];
        for block_size in [usize::MAX - 15, usize::MAX] {
            let plan = Plan::new(tables, 5, block_size, &attention(None));
            assert_eq!(plan.expect_err("too long"), PlanError::TooLong(1));
        }
        assert!(Plan::new(tables, 5, usize::MAX - 16, &attention(None)).is_ok());
    }

    #[test]
    fn long_runs_are_cut_and_the_costly_come_first() {
        let tables = BlockTables {
            qo_indptr: &[0, 100],
            kv_indptr: &[0, 8],
            kv_indices: &[0; 8],
            last_page_len: &[16],
            first_pages: None,
        };
        let plan = plan(tables).expect("good tables");
        let runs: Vec<_> = plan.tasks().iter().map(|t| (t.queries.clone(), t.start)).collect();
        assert_eq!(runs, [(42..84, 70), (0..42, 28), (84..100, 112)]);
    }
}
