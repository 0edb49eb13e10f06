//! The kernel: a run of queries of one sequence and one key-value head, tile by tile of the keys.

use std::array::from_fn;
use std::ops::Range;

use prefixcache_cpu::memory::prefetch;
use prefixcache_cpu::tile::{MAX_HEIGHT, TileWork, heights, run_tile, widths};
use prefixcache_cpu::{Bf16, Form, Kernel, Lanes, OutOfMemory, Rows, RowsMut, Team};

use crate::Attention;
use crate::codes::{CodeGroup, PanelNumber, dot_panels, group_at, unpack};
use crate::kept::KvPages;
use crate::paged::{GROUP, KvElement, TILE, holds_groups, pack_keys};
use crate::plan::{Plan, Task};
use crate::rotation::rotated_queries;
use crate::state::{Sight, Workspace};

/// Attends from each query to the keys of its sequence up to its own position.
///
/// `queries` and `out` are [T, H * D].
/// Where there are `sinks`, each head has one: a score, not scaled, of a key whose value is zero.
///
/// # Errors
/// There is no memory for rotated queries or the sums of a task; some rows of `out` are not written then.
///
/// # Panics
/// The shapes do not fit each other or the plan.
pub fn attend<E: KvElement>(
    form: Form,
    team: &Team,
    plan: &Plan,
    cache: KvPages<'_, E>,
    queries: Rows<'_, E>,
    sinks: Option<&[f32]>,
    out: &RowsMut<'_, E>,
) -> Result<(), OutOfMemory> {
    let attention = plan.attention();
    let (width, kv_heads) = (attention.heads * attention.head_dim, attention.kv_heads);
    assert_eq!(queries.shape(), (plan.num_queries(), width), "queries");
    assert_eq!(out.shape(), (plan.num_queries(), width), "shape of out");
    let page = match cache {
        KvPages::Numbers(_) => 2 * kv_heads * plan.block_size() * attention.head_dim,
        KvPages::Codes(_) => attention.code_bytes(plan.block_size()),
    };
    let is_code = matches!(cache, KvPages::Codes(_));
    assert!(!is_code || holds_groups(plan.block_size()), "tokens of a block");
    assert_eq!(cache.shape().1, page, "width of the cache");
    assert!(sinks.is_none_or(|sinks| sinks.len() == attention.heads), "sinks");
    assert!(cache.shape().0 >= plan.num_pages(), "rows of the cache");
    let rotated = match cache {
        KvPages::Numbers(_) => None,
        KvPages::Codes(_) => Some(rotated_queries(form, team, attention, queries)?),
    };
    let queries = rotated.as_ref().map_or(queries, |rotated| Rows::new(rotated, width));
    let tasks = plan.tasks();
    team.try_run(tasks.len() * kv_heads, |number| {
        let (task, kv_head) = (&tasks[number / kv_heads], number % kv_heads);
        let run = QueryRun { attention, plan, cache, queries, sinks, out, task, kv_head };
        match (run.of_type(), run.of_type()) {
            (Some(run), _) => run_f32(form, run),
            (_, Some(run)) => run_bf16(form, run),
            _ => unreachable!("no other type holds keys"),
        }
    })
}

/// Not generic, so that crates which use it need not compile the kernel again.
fn run_f32(form: Form, run: QueryRun<'_, f32>) -> Result<(), OutOfMemory> {
    form.run(run)
}

/// Not generic for the same reason.
fn run_bf16(form: Form, run: QueryRun<'_, Bf16>) -> Result<(), OutOfMemory> {
    form.run(run)
}

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

/// Words of a head between two shares of what is fetched; heads have multiples of them.
const DEPTH: usize = 8;

struct QueryRun<'a, E> {
    attention: &'a Attention,
    plan: &'a Plan,
    cache: KvPages<'a, E>,
    queries: Rows<'a, E>,
    sinks: Option<&'a [f32]>,
    out: &'a RowsMut<'a, E>,
    task: &'a Task,
    kv_head: usize,
}

impl<'a, E: KvElement> QueryRun<'a, E> {
    /// The same, if it is of type `U`.
    fn of_type<U: KvElement>(&self) -> Option<QueryRun<'a, U>> {
        Some(QueryRun {
            attention: self.attention,
            plan: self.plan,
            cache: self.cache.of_type()?,
            queries: self.queries.of_type()?,
            sinks: self.sinks,
            out: self.out.of_type()?,
            task: self.task,
            kv_head: self.kv_head,
        })
    }
}

impl<E: KvElement> Kernel for QueryRun<'_, E> {
    type Output = Result<(), OutOfMemory>;

    const HAS_BF16: bool = E::PER_WORD > 1;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> Self::Output {
        let rows = self.task.queries.len() * self.attention.group();
        let in_place = matches!(self.cache, KvPages::Numbers(_)) && self.holds_groups();
        let mut workspace = Workspace::new(rows, self.attention.head_dim, in_place)?;
        let end = self.task.start + self.task.queries.len();
        let first = self.attention.first_seen(self.task.start) / TILE * TILE;
        for tile in (first..end).step_by(TILE) {
            let panels = self.panels(lanes, tile, end, &mut workspace);
            for (row, height) in heights(rows) {
                self.advance_rows(lanes, tile, row, height, &panels, &mut workspace);
            }
        }
        for row in 0..rows {
            self.finish(lanes, row, &workspace);
        }
        Ok(())
    }
}

impl<E: KvElement> QueryRun<'_, E> {
    /// The keys and values of the tile before `end`; zeros stand for those behind every row's
    /// window, whose pages may have been given away.
    #[inline(always)]
    fn panels<L: Lanes>(
        &self,
        lanes: L,
        tile: usize,
        end: usize,
        workspace: &mut Workspace,
    ) -> Panels {
        match self.cache {
            KvPages::Codes(pages) => self.unpacked(lanes, pages, tile, end, workspace),
            KvPages::Numbers(pages) if self.holds_groups() => {
                self.groups(pages, tile, end, workspace)
            }
            KvPages::Numbers(pages) => {
                self.pack(lanes, pages, tile, end, workspace);
                Panels::in_workspace(workspace, self.attention.head_dim, E::PER_WORD)
            }
        }
    }

    /// Whether the cache holds packed groups.
    #[inline(always)]
    fn holds_groups(&self) -> bool {
        holds_groups(self.plan.block_size())
    }

    /// The keys of the tile before `end` that some row may see.
    #[inline(always)]
    fn seen(&self, tile: usize, end: usize) -> Range<usize> {
        let first = self.attention.first_seen(self.task.start);
        first.saturating_sub(tile)..TILE.min(end.saturating_sub(tile))
    }

    /// The groups of the tile that some row may see.
    #[inline(always)]
    fn seen_groups(&self, tile: usize, end: usize) -> Range<usize> {
        let seen = self.seen(tile, end);
        seen.start / GROUP..seen.end.div_ceil(GROUP)
    }

    /// Where the packed groups of the tile stand, and what is to be read after it.
    #[inline(always)]
    fn groups(&self, pages: Rows<'_, E>, tile: usize, end: usize, workspace: &Workspace) -> Panels {
        let zeros = workspace.zeros.as_slice().as_ptr();
        let mut panels = Panels::new([zeros; TILE / GROUP], [zeros; TILE / GROUP]);
        for group in self.seen_groups(tile, end) {
            let (key, value) = self.numbers(pages, tile + group * GROUP, GROUP);
            panels.keys[group] = key.cast();
            panels.values[group] = value.cast();
        }
        panels.soon_bytes = GROUP * self.attention.head_dim * size_of::<E>();
        let mut next = [zeros; TILE / GROUP];
        for group in self.seen_groups(tile + TILE, end) {
            next[group] = self.numbers(pages, tile + TILE + group * GROUP, GROUP).0.cast();
        }
        panels.soon = [Some(panels.values), (tile + TILE < end).then_some(next)];
        panels
    }

    /// Where the codes of the tile stand; where several runs of rows read them, the numbers that they are, which are
    /// written to the workspace once.
    #[inline(always)]
    fn unpacked<L: Lanes>(
        &self,
        lanes: L,
        pages: Rows<'_, u8>,
        tile: usize,
        end: usize,
        workspace: &mut Workspace,
    ) -> Panels {
        let dims = self.attention.head_dim;
        let (at, words) = (CodeGroup::new(dims), GROUP * dims / E::PER_WORD);
        let is_read_once = self.task.queries.len() * self.attention.group() <= MAX_HEIGHT;
        let mut panels = Panels::in_workspace(workspace, dims, E::PER_WORD);
        panels.are_codes = is_read_once;
        for group in self.seen_groups(tile, end) {
            let codes = self.codes(pages, tile + group * GROUP);
            let keys = &mut workspace.keys.as_mut_slice()[group * words..][..words];
            let values = &mut workspace.values.as_mut_slice()[group * words..][..words];
            let scales = workspace.scales.as_mut_slice();
            // SAFETY: a group has GROUP * D codes of keys, and of values, and GROUP scales of each; the
            // slices hold as many numbers.
            unsafe {
                let from = codes.as_ptr();
                let of_values = from.add(at.values);
                if is_read_once {
                    panels.keys[group] = from.cast();
                    panels.values[group] = of_values.cast();
                } else {
                    unpack::<E, L>(lanes, from.cast(), (dims, GROUP), keys.as_mut_ptr());
                    unpack::<E, L>(lanes, of_values.cast(), (GROUP, dims), values.as_mut_ptr());
                }
                for (of, start) in [at.key_scales, at.value_scales].into_iter().enumerate() {
                    let to = scales[of * TILE + group * GROUP..][..GROUP].as_mut_ptr();
                    to.cast::<u8>().copy_from_nonoverlapping(from.add(start), 4 * GROUP);
                }
            }
        }
        let scales = workspace.scales.as_slice().as_ptr().cast::<f32>();
        panels.scales = Some([scales, scales.wrapping_add(TILE)]);
        if tile + TILE < end {
            panels.soon_bytes = CodeGroup::bytes(dims) / 2;
            let nobody = workspace.scales.as_slice().as_ptr();
            let mut halves = [[nobody; TILE / GROUP]; 2];
            for group in self.seen_groups(tile + TILE, end) {
                let next = self.codes(pages, tile + TILE + group * GROUP).as_ptr().cast();
                halves[0][group] = next;
                halves[1][group] = next.wrapping_byte_add(panels.soon_bytes);
            }
            panels.soon = halves.map(Some);
        }
        panels
    }

    /// The codes and scales of the group of a position.
    #[inline(always)]
    fn codes<'b>(&self, pages: Rows<'b, u8>, position: usize) -> &'b [u8] {
        let (dims, size) = (self.attention.head_dim, self.plan.block_size());
        let (page, offset) = self.plan.place(self.task.sequence, position);
        let start = group_at(self.kv_head, offset, dims, size);
        &pages.row(page)[start..][..CodeGroup::bytes(dims)]
    }

    /// What asks for the groups in `shares` shares, if there are groups to be read soon.
    #[inline(always)]
    fn fetch(&self, groups: Option<Groups>, bytes: usize, shares: usize) -> Fetch {
        let lines = TILE / GROUP * bytes / CACHE_LINE;
        Fetch {
            groups: groups.unwrap_or([std::ptr::null(); TILE / GROUP]),
            bytes,
            share: lines.div_ceil(shares),
            group: if groups.is_some() { 0 } else { TILE / GROUP },
            at: 0,
        }
    }

    /// Where the keys and values of `count` positions stand, which lie in one page.
    #[inline(always)]
    fn numbers(&self, pages: Rows<'_, E>, position: usize, count: usize) -> (*const E, *const E) {
        let (dims, kv_heads) = (self.attention.head_dim, self.attention.kv_heads);
        let (page, offset) = self.plan.place(self.task.sequence, position);
        let (page, size) = (pages.row(page), self.plan.block_size());
        let part = |head| &page[(head * size + offset) * dims..][..count * dims];
        let (keys, values) = (part(self.kv_head), part(self.kv_head + kv_heads));
        (keys.as_ptr(), values.as_ptr())
    }

    /// Packs the keys and values of the tile that some row may see; zeros stand for the others.
    #[inline(always)]
    fn pack<L: Lanes>(
        &self,
        lanes: L,
        pages: Rows<'_, E>,
        tile: usize,
        end: usize,
        workspace: &mut Workspace,
    ) {
        let (dims, seen) = (self.attention.head_dim, self.seen(tile, end));
        let mut keys = [std::ptr::null::<E>(); TILE];
        let mut values = [std::ptr::null::<E>(); TILE];
        for k in seen.clone() {
            (keys[k], values[k]) = self.numbers(pages, tile + k, 1);
        }
        let key_words = workspace.keys.as_mut_slice().as_mut_ptr();
        let value_words = workspace.values.as_mut_slice();
        // SAFETY: the pointers are null or heads of `dims` numbers, and the buffers hold
        // `dims * TILE` words.
        unsafe { pack_keys(lanes, &keys, dims / E::PER_WORD, key_words) };
        let lines = value_words.chunks_exact_mut(dims);
        for (pair, line) in
            values[..seen.end.next_multiple_of(E::PER_WORD)].chunks_exact(E::PER_WORD).zip(lines)
        {
            // SAFETY: as above; a line holds `dims` words.
            unsafe { E::pack_values(lanes, pair, dims, line.as_mut_ptr()) };
        }
    }

    /// Takes `height` rows from `row` through the tile, and asks for the keys of the next.
    #[inline(always)]
    fn advance_rows<L: Lanes>(
        &self,
        lanes: L,
        tile: usize,
        row: usize,
        height: usize,
        panels: &Panels,
        workspace: &mut Workspace,
    ) {
        let seen = self.sight(row + height - 1, tile).to;
        if seen == 0 || self.sight(row, tile).from >= TILE {
            return; // No row sees a key of this tile: it would add zeros.
        }
        let vectors = seen.div_ceil(L::LANES);
        let chunks = self.attention.head_dim / E::PER_WORD / DEPTH;
        let soon = if row == 0 { panels.soon } else { [None; 2] };
        let shares = vectors.div_ceil(L::WIDTH) * chunks;
        let mut fetch = self.fetch(soon[0], panels.soon_bytes, shares);
        for (column, is_wide) in widths::<L>(vectors) {
            let scores = Scores {
                fetch: &mut fetch,
                run: self,
                lanes,
                row,
                column: column * L::LANES,
                panels,
                workspace,
            };
            run_tile::<L>(height, is_wide, scores);
        }
        for r in 0..height {
            let sight = self.sight(row + r, tile);
            let scores = &mut workspace.scores.as_mut_slice()[r * TILE..(r + 1) * TILE];
            let line = &mut workspace.probabilities.as_mut_slice()[r * TILE..(r + 1) * TILE];
            // SAFETY: each line, and the scales of a tile, hold TILE numbers, at least `vectors * LANES`.
            unsafe {
                workspace.softmax[row + r].advance::<E, L>(
                    lanes,
                    self.attention,
                    sight,
                    vectors,
                    panels.scales,
                    scores.as_mut_ptr().cast(),
                    line.as_mut_ptr().cast(),
                );
            }
        }
        let depth = seen.div_ceil(E::PER_WORD);
        let vectors = self.attention.head_dim / L::LANES;
        let shares = vectors.div_ceil(L::WIDTH) * seen.div_ceil(GROUP);
        let mut fetch = self.fetch(soon[1], panels.soon_bytes, shares);
        for (column, is_wide) in widths::<L>(vectors) {
            let column_start = column * L::LANES;
            let sums = Sums {
                fetch: &mut fetch,
                run: self,
                lanes,
                row,
                column: column_start,
                depth,
                panels,
                workspace,
            };
            run_tile::<L>(height, is_wide, sums);
        }
    }

    /// Which keys of the tile a row sees.
    #[inline(always)]
    fn sight(&self, row: usize, tile: usize) -> Sight {
        let position = self.task.start + row / self.attention.group();
        Sight {
            from: self.attention.first_seen(position).saturating_sub(tile),
            to: (position + 1).saturating_sub(tile).min(TILE),
        }
    }

    /// The token and the first column of a row, in `queries` and `out`.
    #[inline(always)]
    fn place(&self, row: usize) -> (usize, usize) {
        let group = self.attention.group();
        (self.task.queries.start + row / group, self.head(row) * self.attention.head_dim)
    }

    /// The query head of a row.
    #[inline(always)]
    fn head(&self, row: usize) -> usize {
        let group = self.attention.group();
        self.kv_head * group + row % group
    }

    /// Divides a row's sums by its total, the head's sink among it, and stores it.
    #[inline(always)]
    fn finish<L: Lanes>(&self, lanes: L, row: usize, workspace: &Workspace) {
        let dims = self.attention.head_dim;
        let softmax = &workspace.softmax[row];
        let mut total = lanes.splat(softmax.total(lanes));
        if let Some(sinks) = self.sinks {
            total = lanes.add(total, softmax.probability(lanes, sinks[self.head(row)]));
        }
        let sums = &workspace.sums.as_slice()[row * dims..(row + 1) * dims];
        let (token, column) = self.place(row);
        // SAFETY: each row of each head belongs to one task.
        let out = unsafe { self.out.part(token, column, dims) };
        for d in (0..dims).step_by(L::LANES) {
            // SAFETY: `dims` is a multiple of LANES, and both hold `dims` numbers.
            unsafe {
                let sum = lanes.load(sums.as_ptr().add(d).cast());
                E::store(lanes, out.as_mut_ptr().add(d), lanes.div(sum, total));
            }
        }
    }
}

/// Asks for packed groups before they are read, a share at a time between products: pages stand anywhere,
/// a head's part of one is read before the processor expects it, and more requests at once than it can
/// keep would hold up what follows.
struct Fetch {
    groups: Groups,
    /// Of a group.
    bytes: usize,
    /// Lines of a share.
    share: usize,
    group: usize,
    at: usize,
}

impl Fetch {
    /// Asks for the next share, as far as there are lines.
    #[inline(always)]
    fn next(&mut self) {
        for _ in 0..self.share {
            if self.group == self.groups.len() {
                return;
            }
            prefetch(self.groups[self.group].wrapping_byte_add(self.at));
            self.at += CACHE_LINE;
            if self.at >= self.bytes {
                (self.group, self.at) = (self.group + 1, 0);
            }
        }
    }
}

/// Where the packed groups of a tile stand; those that nobody sees may be anywhere.
struct Panels {
    keys: Groups,
    values: Groups,
    /// Of the tile's keys and of its values, where they are codes.
    scales: Option<[*const f32; 2]>,
    /// Whether the groups are codes, and not words.
    are_codes: bool,
    /// What is read soon: to be asked for while scores are computed, and while values are added.
    soon: [Option<Groups>; 2],
    /// Bytes of each of these groups.
    soon_bytes: usize,
}

/// Where each packed group of a tile starts.
type Groups = [*const u32; TILE / GROUP];

impl Panels {
    #[inline(always)]
    fn new(keys: Groups, values: Groups) -> Self {
        Self { keys, values, scales: None, are_codes: false, soon: [None; 2], soon_bytes: 0 }
    }

    /// The groups that were packed into the workspace.
    #[inline(always)]
    fn in_workspace(workspace: &Workspace, dims: usize, per_word: usize) -> Self {
        let words = GROUP * dims / per_word;
        Self::new(
            from_fn(|group| workspace.keys.as_slice()[group * words..].as_ptr()),
            from_fn(|group| workspace.values.as_slice()[group * words..].as_ptr()),
        )
    }

    /// The first numbers of the keys from number `key` of the tile on.
    ///
    /// # Safety
    /// The key's group is there, and of numbers of type P.
    #[inline(always)]
    unsafe fn key_vector<P>(&self, key: usize) -> *const P {
        // SAFETY: a group starts with a line of 16 numbers.
        unsafe { self.keys[key / GROUP].cast::<P>().add(key % GROUP) }
    }
}

/// Dot products of a few rows with a few vectors of keys from `column`.
struct Scores<'a, 'b, E, L> {
    /// For the values.
    fetch: &'a mut Fetch,
    run: &'a QueryRun<'b, E>,
    lanes: L,
    row: usize,
    column: usize,
    panels: &'a Panels,
    workspace: &'a mut Workspace,
}

impl<E: KvElement, L: Lanes> TileWork for Scores<'_, '_, E, L> {
    #[inline(always)]
    fn run<const H: usize, const W: usize>(self) {
        match self.panels.are_codes {
            true => self.of::<i8, H, W>(),
            false => self.of::<u32, H, W>(),
        }
    }
}

impl<E: KvElement, L: Lanes> Scores<'_, '_, E, L> {
    #[inline(always)]
    fn of<P: PanelNumber<E>, const H: usize, const W: usize>(self) {
        let Self { fetch, run, lanes, row, column, panels, workspace } = self;
        let dims = run.attention.head_dim;
        let mut rows: [*const u32; H] = from_fn(|r| {
            let (token, start) = run.place(row + r);
            run.queries.row(token)[start..start + dims].as_ptr().cast()
        });
        let mut acc = [[lanes.splat(0.0); W]; H];
        // SAFETY: the groups up to `column + W * LANES` hold keys that a row sees.
        let mut keys: [*const P; W] =
            from_fn(|c| unsafe { panels.key_vector(column + c * L::LANES) });
        for _ in (0..dims / E::PER_WORD).step_by(DEPTH) {
            fetch.next();
            // SAFETY: a head holds `dims / PER_WORD` words, a multiple of DEPTH; a group of keys has as
            // many lines of 16 words, or twice as many of codes, of which a vector starts inside and ends inside.
            unsafe {
                dot_panels::<E, P, L, H, W>(lanes, &mut acc, &rows, &keys, GROUP, DEPTH);
                for row in &mut rows {
                    *row = row.add(DEPTH);
                }
            }
            for key in &mut keys {
                *key = key.wrapping_add(DEPTH * P::PER_WORD * GROUP);
            }
        }
        for (r, dots) in acc.iter().enumerate() {
            let line = &mut workspace.scores.as_mut_slice()[r * TILE + column..][..W * L::LANES];
            for (c, &dot) in dots.iter().enumerate() {
                // SAFETY: the slice holds W vectors.
                unsafe { lanes.store(line.as_mut_ptr().add(c * L::LANES).cast(), dot) };
            }
        }
    }
}

/// Adds `depth` words of weighted values to the rescaled sums, a few rows and vectors of them.
struct Sums<'a, 'b, E, L> {
    /// For the next tile's keys.
    fetch: &'a mut Fetch,
    run: &'a QueryRun<'b, E>,
    lanes: L,
    row: usize,
    column: usize,
    depth: usize,
    panels: &'a Panels,
    workspace: &'a mut Workspace,
}

impl<E: KvElement, L: Lanes> TileWork for Sums<'_, '_, E, L> {
    #[inline(always)]
    fn run<const H: usize, const W: usize>(self) {
        match self.panels.are_codes {
            true => self.of::<i8, H, W>(),
            false => self.of::<u32, H, W>(),
        }
    }
}

impl<E: KvElement, L: Lanes> Sums<'_, '_, E, L> {
    #[inline(always)]
    fn of<P: PanelNumber<E>, const H: usize, const W: usize>(self) {
        let Self { fetch, run, lanes, row, column, depth, panels, workspace } = self;
        let dims = run.attention.head_dim;
        let probabilities = workspace.probabilities.as_slice();
        let mut acc = [[lanes.splat(0.0); W]; H];
        // Plain loops: closures would be compiled without the form's instructions.
        for (r, sums) in acc.iter_mut().enumerate() {
            let line = &workspace.sums.as_slice()[(row + r) * dims + column..][..W * L::LANES];
            let factor = workspace.softmax[row + r].factor(lanes);
            for (c, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the slice holds W vectors.
                let before = unsafe { lanes.load(line.as_ptr().add(c * L::LANES).cast()) };
                *sum = lanes.mul(before, factor);
            }
        }
        let lines = GROUP / E::PER_WORD;
        for (group, first) in (0..depth).step_by(lines).enumerate() {
            let rows = from_fn(|r| probabilities[r * TILE + first..(r + 1) * TILE].as_ptr());
            let depth = lines.min(depth - first);
            fetch.next();
            // SAFETY: a row of probabilities holds TILE words, at least `first + depth`; the
            // group's values have `depth` lines of `dims` words, and W vectors from `column`
            // stay inside a line.
            unsafe {
                let of_group = panels.values[group].cast::<P>();
                let values = from_fn(|c| of_group.add(column + c * L::LANES));
                dot_panels::<E, P, L, H, W>(lanes, &mut acc, &rows, &values, dims, depth);
            }
        }
        for (r, sums) in acc.iter().enumerate() {
            let start = (row + r) * dims + column;
            let line = &mut workspace.sums.as_mut_slice()[start..][..W * L::LANES];
            for (c, &sum) in sums.iter().enumerate() {
                // SAFETY: the slice holds W vectors.
                unsafe { lanes.store(line.as_mut_ptr().add(c * L::LANES).cast(), sum) };
            }
        }
    }
}
