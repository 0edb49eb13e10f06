//! Tiles of weights times quantized rows.

use std::marker::PhantomData;

use prefixcache_cpu::{ByteForm, ByteKernel, ByteLanes};

use super::Int8Weight;
use super::activations::{ActivationBlock, QuantizedRows};
use super::tiles::{Layout, TILE, TILES};
use crate::panel::{PANEL, Sums};
use crate::quant::blocks::{Format, Scales};

/// Bytes of a cache line.
const LINE: usize = 64;

/// Bytes from a block to what is fetched while it is multiplied.
const AHEAD: usize = 4096;

/// The same where units are read in the order of memory: half of what a processor's own prefetcher follows as
/// one stream, a page of 4 KiB.
const NEXT: usize = 2048;

/// The most vectors that the outputs of a unit are.
const VECTORS: usize = TILE / 8;

/// Rows of a register tile.
const MAX_HEIGHT: usize = 3;

/// The most rows that are multiplied in one pass over a panel, their sums in memory: another pass
/// would unpack all codes again.
const MAX_FEW: usize = 8;

impl Int8Weight {
    /// Writes the sums of a panel and the rows of x from `first` on, as many as `sums` has.
    ///
    /// # Panics
    /// There is no such panel or row.
    pub fn multiply(
        &self,
        form: ByteForm,
        panel: usize,
        x: &QuantizedRows,
        first: usize,
        sums: &mut [Sums],
    ) {
        PanelTask { weight: self, panel, x, first, sums }.run(form);
    }
}

/// Rows whose sums are kept in memory while a panel is multiplied: with its codes they stay in the first
/// cache.
const SUMMED_ROWS: usize = 24;

/// Rows from which on [`Panel::multiply_tiles`] is the faster way.
const MANY: usize = 16;

/// Rows of a tile of [`Panel::multiply_wide`], rows from which on it is the faster way, and rows whose sums it keeps
/// in memory: more than elsewhere, since codes are unpacked once for them.
const WIDE_ROWS: usize = 6;
const MANY_WIDE: usize = 12;
const SUMMED_WIDE_ROWS: usize = 48;

/// A format as a type, so that a kernel is compiled for it.
trait Packed {
    const LAYOUT: Layout;
    /// See [`Format::is_common`].
    const IS_COMMON: bool;
}

macro_rules! formats {
    ($($name:ident),*) => {
        $(
            struct $name;
            impl Packed for $name {
                const LAYOUT: Layout = Layout::of(Format::$name);
                const IS_COMMON: bool = Format::$name.is_common();
            }
        )*

        impl PanelTask<'_> {
            fn run(self, form: ByteForm) {
                match self.weight.format() {
                    $(Format::$name => form.run(OfFormat::<$name>(self, PhantomData)),)*
                }
            }
        }
    };
}

formats!(Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4K, Q5K, Q6K, Q2K, Q3K, IQ4NL, IQ4XS, MXFP4);

/// One panel times a few rows.
struct PanelTask<'a> {
    weight: &'a Int8Weight,
    panel: usize,
    x: &'a QuantizedRows,
    first: usize,
    sums: &'a mut [Sums],
}

/// A panel of a format that the compiler knows: a function for each, which it compiles faster than one for all.
struct OfFormat<'a, P>(PanelTask<'a>, PhantomData<P>);

impl<P: Packed> ByteKernel for OfFormat<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<L: ByteLanes>(self, lanes: L) {
        self.0.multiply::<P, L>(lanes);
    }
}

impl PanelTask<'_> {
    #[inline(always)]
    fn multiply<P: Packed, L: ByteLanes>(mut self, lanes: L) {
        let panel = Panel::<P, L>::new(lanes, self.weight, self.panel);
        let mut first = self.first;
        if const { L::DOT_OF_FOUR && L::LANES == TILE }
            && panel.width == TILES
            && self.sums.len() >= MANY_WIDE
        {
            let in_tiles = self.sums.len() / WIDE_ROWS * WIDE_ROWS;
            let (many, few) = std::mem::take(&mut self.sums).split_at_mut(in_tiles);
            for sums in many.chunks_mut(SUMMED_WIDE_ROWS) {
                panel.multiply_wide(self.x, first, sums);
                first += sums.len();
            }
            self.sums = few;
        }
        // A kernel for each number of rows is compiled for the formats that most files are made of.
        if const { !L::DOT_OF_FOUR || !P::IS_COMMON } {
            if let ([sums], true) = (&mut *self.sums, const { !L::DOT_OF_FOUR }) {
                return panel.multiply_one(self.x.row(first), sums);
            }
            let in_tiles = match const { tile_rows::<P, L>() } {
                0 => 0,
                _ if self.sums.len() < MANY => 0,
                rows => self.sums.len() / rows * rows,
            };
            let (many, few) = self.sums.split_at_mut(in_tiles);
            for sums in many.chunks_mut(SUMMED_ROWS) {
                panel.multiply_tiles(self.x, first, sums);
                first += sums.len();
            }
            for sums in few.chunks_mut(SUMMED_ROWS) {
                panel.multiply_in_memory(self.x, first, sums);
                first += sums.len();
            }
            return;
        }
        let unpacks_quickly = const { P::LAYOUT.bits == 4 && P::LAYOUT.blocks == 1 };
        let height = match self.sums.len() {
            // An eighth row for nothing would take longer than another pass.
            7 if unpacks_quickly => MAX_HEIGHT,
            few @ (4 | 7..=MAX_FEW) => few,
            _ => MAX_HEIGHT,
        };
        for sums in self.sums.chunks_mut(height) {
            match sums.len() {
                1 => panel.multiply::<1>(self.x, first, sums),
                2 => panel.multiply::<2>(self.x, first, sums),
                3 => panel.multiply::<MAX_HEIGHT>(self.x, first, sums),
                4 => panel.multiply::<4>(self.x, first, sums),
                _ => panel.multiply::<MAX_FEW>(self.x, first, sums),
            }
            first += sums.len();
        }
    }
}

/// A panel whose format and vectors the compiler knows.
struct Panel<P, L> {
    lanes: L,
    units: *const u8,
    /// Units side by side.
    width: usize,
    /// Units along the depth.
    depth: usize,
    format: PhantomData<P>,
}

impl<P: Packed, L: ByteLanes> Panel<P, L> {
    #[inline(always)]
    fn new(lanes: L, weight: &Int8Weight, panel: usize) -> Self {
        Self {
            lanes,
            units: weight.panel(panel).as_ptr(),
            width: weight.width(panel),
            depth: weight.depth(),
            format: PhantomData,
        }
    }

    /// Multiplies it with up to `H` rows.
    #[inline(always)]
    fn multiply<const H: usize>(&self, x: &QuantizedRows, first: usize, sums: &mut [Sums]) {
        // Rows that there are not are the last one, computed for nothing.
        let last = first + sums.len() - 1;
        let rows = std::array::from_fn(|r| x.row(last.min(first + r)).as_ptr());
        // SAFETY: a row of x has the blocks of the panel's depth, and the groups are all that the panel has.
        unsafe {
            if const { L::LANES < TILE } {
                self.sums::<H, 2, TILES>(self.width * TILE / (2 * L::LANES), rows, sums);
            } else if self.width < TILES {
                self.sums::<H, 1, TILES>(self.width, rows, sums);
            } else if const { H == 1 || H > MAX_HEIGHT } {
                self.sums::<H, 1, TILES>(TILES, rows, sums);
            } else if const { P::LAYOUT.halves() && H > 2 } {
                // With sums of halves more would not fit into the registers.
                self.sums::<H, 2, 2>(2, rows, sums);
            } else {
                self.sums::<H, TILES, 1>(1, rows, sums);
            }
        }
    }

    /// Multiplies it with one row, whose numbers are loaded once for all vectors of a unit.
    #[inline(always)]
    fn multiply_one(&self, x: &[ActivationBlock], sums: &mut Sums) {
        let (lanes, layout) = (self.lanes, const { P::LAYOUT });
        sums.fill(0.0);
        for number in 0..self.depth * self.width {
            let (d, tile) = (number / self.width, number % self.width);
            let unit = self.units.wrapping_add(number * layout.unit());
            let to = sums[tile * TILE..][..TILE].as_mut_ptr();
            let mut acc = [lanes.splat_f32(0.0); VECTORS];
            // SAFETY: the panel has the unit with its blocks, and its sums.
            unsafe {
                let headers = headers::<P, L>(lanes, unit);
                for (v, acc) in acc.iter_mut().enumerate().take(TILE / L::LANES) {
                    *acc = lanes.load_f32(to.add(v * L::LANES));
                }
                for (b, x) in x[d * layout.blocks..][..layout.blocks].iter().enumerate() {
                    self.fetch_block(unit, b);
                    let at = layout.header() + b * layout.block();
                    add_one::<P, L>(lanes, unit, at, &headers, x, &mut acc);
                }
                for (v, &acc) in acc.iter().enumerate().take(TILE / L::LANES) {
                    lanes.store(to.add(v * L::LANES), acc);
                }
            }
        }
    }

    /// Multiplies it with some rows, whose sums are in memory: what takes the time is to unpack codes and to
    /// multiply them.
    #[inline(always)]
    fn multiply_in_memory(&self, x: &QuantizedRows, first: usize, sums: &mut [Sums]) {
        let (lanes, layout) = (self.lanes, const { P::LAYOUT });
        sums.fill([0.0; PANEL]);
        let (row, stride) = (x.row(first).as_ptr(), x.stride());
        for number in 0..self.depth * self.width {
            let (d, tile) = (number / self.width, number % self.width);
            let unit = self.units.wrapping_add(number * layout.unit());
            // SAFETY: the panel has the unit.
            let headers = unsafe { headers::<P, L>(lanes, unit) };
            for b in 0..layout.blocks {
                self.fetch_block(unit, b);
                for (v, &header) in headers.iter().enumerate().take(TILE / L::LANES) {
                    // SAFETY: the unit has such a block, and each row as many blocks.
                    unsafe {
                        let at = layout.header() + b * layout.block();
                        let block = Unpacked::<P, L>::new(lanes, unit, at, v * L::LANES, header);
                        let mut x = row.add(d * layout.blocks + b);
                        for sums in &mut *sums {
                            let to = sums[tile * TILE + v * L::LANES..][..L::LANES].as_mut_ptr();
                            let acc = lanes.load_f32(to);
                            lanes.store(to, block.add_row(lanes, &*x, acc));
                            x = x.wrapping_add(stride);
                        }
                    }
                }
            }
        }
    }

    /// Multiplies it with whole tiles of rows: both vectors of a unit share what is loaded of x, and rows what is loaded
    /// of the weight.
    #[inline(always)]
    fn multiply_tiles(&self, x: &QuantizedRows, first: usize, sums: &mut [Sums]) {
        let (lanes, layout) = (self.lanes, const { P::LAYOUT });
        sums.fill([0.0; PANEL]);
        let (row, stride) = (x.row(first).as_ptr(), x.stride());
        for number in 0..self.depth * self.width {
            let (d, tile) = (number / self.width, number % self.width);
            let unit = self.units.wrapping_add(number * layout.unit());
            // SAFETY: the panel has the unit.
            let headers = unsafe { headers::<P, L>(lanes, unit) };
            for b in 0..layout.blocks {
                self.fetch_block(unit, b);
                let at = layout.header() + b * layout.block();
                let x = row.wrapping_add(d * layout.blocks + b);
                // SAFETY: the unit has such a block, and each row as many blocks.
                unsafe {
                    let block = UnpackedBlock::<P, L>::new(lanes, unit, at, &headers);
                    if const { tile_rows::<P, L>() == 2 } {
                        block.add_all::<2>(x, stride, sums, tile);
                    } else {
                        block.add_all::<4>(x, stride, sums, tile);
                    }
                }
            }
        }
    }

    /// Multiplies it, which is as wide as any, with whole tiles of rows: its codes are unpacked once for all of them.
    #[inline(always)]
    fn multiply_wide(&self, x: &QuantizedRows, first: usize, sums: &mut [Sums]) {
        let (lanes, layout) = (self.lanes, const { P::LAYOUT });
        sums.fill([0.0; PANEL]);
        let (row, stride) = (x.row(first).as_ptr(), x.stride());
        for d in 0..self.depth {
            let units = self.units.wrapping_add(d * TILES * layout.unit());
            for b in 0..layout.blocks {
                let at = layout.header() + b * layout.block();
                let mut x = row.wrapping_add(d * layout.blocks + b);
                // SAFETY: the panel has four such units, each of them the block, and each row as many blocks.
                unsafe {
                    for tile in 0..TILES {
                        self.fetch_block(units.add(tile * layout.unit()), b);
                    }
                    let block = WideBlock::<P, L>::new(lanes, units, at);
                    for sums in sums.as_chunks_mut::<WIDE_ROWS>().0 {
                        block.add_rows(x, stride, sums);
                        x = x.wrapping_add(WIDE_ROWS * stride);
                    }
                }
            }
        }
    }

    /// Asks for what lies ahead of a block.
    #[inline(always)]
    fn fetch_block(&self, unit: *const u8, b: usize) {
        let share = const { P::LAYOUT.unit() / P::LAYOUT.blocks };
        for line in 0..share.div_ceil(LINE) {
            let ahead = NEXT + b * share + line * LINE;
            self.lanes.prefetch(unit.wrapping_add(ahead));
        }
    }

    /// Asks for what lies `ahead` of a block in `W` vectors: a few rows wait for memory otherwise.
    #[inline(always)]
    fn fetch<const W: usize>(&self, d: usize, group: usize, b: usize, ahead: usize) {
        let layout = const { P::LAYOUT };
        let bytes = W * L::LANES / TILE * (layout.unit() / layout.blocks);
        let unit = d * self.width + group * W * L::LANES / TILE;
        let at = self.units.wrapping_add(unit * layout.unit() + b * bytes + ahead);
        for line in 0..bytes.div_ceil(LINE) {
            self.lanes.prefetch(at.wrapping_add(line * LINE));
        }
    }

    /// Writes the sums of `H` rows, in `groups` groups of `W` vectors of outputs, `G` at most: a constant where panels
    /// are whole, so that sums stay in registers.
    ///
    /// # Safety
    /// Each row has the blocks of the panel's depth, and the panel has the units of the groups.
    #[inline(always)]
    unsafe fn sums<const H: usize, const W: usize, const G: usize>(
        &self,
        groups: usize,
        rows: [*const ActivationBlock; H],
        sums: &mut [Sums],
    ) {
        let (lanes, layout) = (self.lanes, const { P::LAYOUT });
        let outputs = W * L::LANES;
        debug_assert!(groups * outputs <= self.width * TILE, "units of the panel");
        let mut acc = [[[lanes.splat_f32(0.0); W]; H]; G];
        let steps = const { steps::<P, H>() };
        let ahead = if steps == 1 { AHEAD } else { steps * self.width * layout.unit() };
        for first in (0..self.depth).step_by(steps) {
            for (group, acc) in acc[..groups].iter_mut().enumerate() {
                for d in first..self.depth.min(first + steps) {
                    let mut columns = [(self.units, 0); W];
                    // SAFETY: the units lie in the panel, and their blocks in the rows.
                    unsafe {
                        for (j, column) in columns.iter_mut().enumerate() {
                            let output = group * outputs + j * L::LANES;
                            let unit = d * self.width + output / TILE;
                            *column = (self.units.add(unit * layout.unit()), output % TILE);
                        }
                        for b in 0..layout.blocks {
                            let x = rows.map(|row| row.add(d * layout.blocks + b));
                            self.fetch::<W>(d, group, b, ahead);
                            add_block::<P, L, H, W>(lanes, acc, &columns, &x, b);
                        }
                    }
                }
            }
        }
        for (group, acc) in acc[..groups].iter().enumerate() {
            for (sums, acc) in sums.iter_mut().zip(acc) {
                for (j, &acc) in acc.iter().enumerate() {
                    let to = &mut sums[group * outputs + j * L::LANES..][..L::LANES];
                    // SAFETY: the slice holds LANES numbers.
                    unsafe { lanes.store(to.as_mut_ptr(), acc) };
                }
            }
        }
    }
}

/// The numbers of a block in a vector of outputs.
struct Unpacked<P, L: ByteLanes> {
    /// Of the first 16 steps, four each, and of the others.
    codes: [L::I; 8],
    scaling: Scaling<P, L>,
}

impl<P: Packed, L: ByteLanes> Unpacked<P, L> {
    /// # Safety
    /// As of [`Scaling::new`].
    #[inline(always)]
    unsafe fn new(lanes: L, unit: *const u8, at: usize, lane: usize, header: (L::F, L::F)) -> Self {
        let mut codes = [lanes.splat(0); 8];
        let mut high = lanes.splat(0);
        // SAFETY: the caller vouches for the unit, whose parts these are.
        unsafe {
            for g in 0..4 {
                let from = unit.add(at + 4 * lane);
                (codes[g], codes[4 + g]) = four_steps::<P, L>(lanes, from, g, &mut high);
            }
            let scaling = Scaling::new(lanes, unit, at, lane, header);
            Self { codes, scaling }
        }
    }

    /// A row's sums with the products of its block.
    #[inline(always)]
    fn add_row(&self, lanes: L, x: &ActivationBlock, acc: L::F) -> L::F {
        let words = x.codes.as_ptr().cast::<i32>();
        // SAFETY: a block of x has eight words.
        let sum = unsafe {
            if const { P::LAYOUT.halves() } {
                let [first, second] = self.scaling.factors;
                let low = dots::<P, L>(lanes, &self.codes[..4], words, Some(first));
                let upper = dots::<P, L>(lanes, &self.codes[4..], words.add(4), Some(second));
                lanes.add(low, upper)
            } else {
                dots::<P, L>(lanes, &self.codes, words, None)
            }
        };
        let x = Factors::new(lanes, x);
        let sum = self.scaling.less_offset(lanes, sum, &x);
        self.scaling.add(lanes, lanes.to_f32(sum), &x, acc)
    }
}

/// The numbers of a block of 16 outputs, to be multiplied with many rows.
struct UnpackedBlock<P, L: ByteLanes> {
    lanes: L,
    /// Eight, which the compiler is not to know: unrolled, most sums would not stay in registers.
    words: usize,
    vectors: [Unpacked<P, L>; VECTORS],
    /// Of codes that have signs.
    magnitudes: [[L::I; 8]; VECTORS],
}

impl<P: Packed, L: ByteLanes> UnpackedBlock<P, L> {
    /// # Safety
    /// The unit has codes at `at`; `headers` are its own.
    #[inline(always)]
    unsafe fn new(lanes: L, unit: *const u8, at: usize, headers: &[(L::F, L::F); VECTORS]) -> Self {
        // SAFETY: the caller's promise is the same; a form with tiles has as many vectors.
        let vectors: [Unpacked<P, L>; VECTORS] = unsafe {
            [
                Unpacked::new(lanes, unit, at, 0, headers[0]),
                Unpacked::new(lanes, unit, at, TILE / VECTORS, headers[1]),
            ]
        };
        let mut magnitudes = [vectors[0].codes, vectors[1].codes];
        if const { has_signs::<P, L>() } {
            for magnitudes in magnitudes.as_flattened_mut() {
                *magnitudes = lanes.magnitudes(*magnitudes);
            }
        }
        Self { lanes, words: std::hint::black_box(8), vectors, magnitudes }
    }

    /// Adds the products with rows in tiles of `R`, of which `x` is the first one's block, to their sums of unit `tile`.
    ///
    /// # Safety
    /// Each of the rows has a block, `stride` blocks after that of the row before it.
    #[inline(always)]
    unsafe fn add_all<const R: usize>(
        &self,
        mut x: *const ActivationBlock,
        stride: usize,
        sums: &mut [Sums],
        tile: usize,
    ) {
        for sums in sums.as_chunks_mut::<R>().0 {
            // SAFETY: the caller's promise is the same.
            unsafe { self.add_rows(x, stride, sums, tile) };
            x = x.wrapping_add(R * stride);
        }
    }

    /// Adds the products with `R` rows.
    ///
    /// # Safety
    /// As of [`Self::add_all`].
    #[inline(always)]
    unsafe fn add_rows<const R: usize>(
        &self,
        x: *const ActivationBlock,
        stride: usize,
        sums: &mut [Sums; R],
        tile: usize,
    ) {
        let (lanes, run) = (self.lanes, const { run::<P>() });
        // Unrolled it keeps sums of pairs of half the words in registers.
        let count = if run == 4 { 8 } else { self.words };
        let mut words = [x.cast::<i32>(); R];
        for (r, words) in words.iter_mut().enumerate() {
            *words = x.wrapping_add(r * stride).cast();
        }
        let [mut totals, mut pairs] = [[[lanes.splat(0); VECTORS]; R]; 2];
        let mut step = 0;
        loop {
            for i in [step, step + 1] {
                for r in 0..R {
                    // SAFETY: a block begins with its codes, which are eight words.
                    let x = lanes.splat(unsafe { words[r].add(i).read_unaligned() });
                    for (v, vector) in self.vectors.iter().enumerate() {
                        // SAFETY: there are eight words here too.
                        let more = unsafe {
                            let codes = *vector.codes.as_ptr().add(i);
                            let magnitudes = match const { has_signs::<P, L>() } {
                                true => *self.magnitudes[v].as_ptr().add(i),
                                false => codes,
                            };
                            products::<P, L>(lanes, codes, magnitudes, x)
                        };
                        if run == 1 {
                            let sum = vector.scaling.sum(lanes, more, 0);
                            totals[r][v] = lanes.add(totals[r][v], sum);
                        } else {
                            pairs[r][v] = lanes.add_pairs(pairs[r][v], more);
                        }
                    }
                }
            }
            if matches!(run, 2 | 4) && (step + 2) % run == 0 {
                for (totals, pairs) in totals.iter_mut().zip(&mut pairs) {
                    for (v, vector) in self.vectors.iter().enumerate() {
                        let sum = vector.scaling.sum(lanes, pairs[v], step / 4);
                        totals[v] = lanes.add(totals[v], sum);
                        pairs[v] = lanes.splat(0);
                    }
                }
            }
            step += 2;
            if step == count {
                break;
            }
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller vouches for the block.
            let x = Factors::new(lanes, unsafe { &*x.wrapping_add(r * stride) });
            for (v, vector) in self.vectors.iter().enumerate() {
                let sum = match run {
                    8 => vector.scaling.sum(lanes, pairs[r][v], 0),
                    _ => totals[r][v],
                };
                let sum = vector.scaling.less_offset(lanes, sum, &x);
                let to = sums[tile * TILE + v * L::LANES..][..L::LANES].as_mut_ptr();
                // SAFETY: the slice holds LANES numbers.
                unsafe {
                    let acc = lanes.load_f32(to);
                    lanes.store(to, vector.scaling.add(lanes, lanes.to_f32(sum), &x, acc));
                }
            }
        }
    }
}

/// The numbers of a block of all outputs of a panel, to be multiplied with many rows.
struct WideBlock<P, L: ByteLanes> {
    lanes: L,
    /// Of a half of the block where halves have factors, else of all. The compiler is not to know it: unrolled, sums
    /// would not stay in registers.
    words: usize,
    vectors: [Unpacked<P, L>; TILES],
    /// Of the sums of both halves, where they have some.
    factors: [[L::F; 2]; TILES],
}

impl<P: Packed, L: ByteLanes> WideBlock<P, L> {
    /// # Safety
    /// Four units lie here, which have codes at `at`.
    #[inline(always)]
    unsafe fn new(lanes: L, units: *const u8, at: usize) -> Self {
        let layout = const { P::LAYOUT };
        let mut factors = [[lanes.splat_f32(0.0); 2]; TILES];
        // SAFETY: the caller's promise is the same.
        let vectors: [Unpacked<P, L>; TILES] = unsafe {
            let [a, b] = [units, units.add(layout.unit())];
            let [c, d] = [units.add(2 * layout.unit()), units.add(3 * layout.unit())];
            // A closure would not be inlined reliably.
            [
                Unpacked::new(lanes, a, at, 0, header_of::<P, L>(lanes, a, 0)),
                Unpacked::new(lanes, b, at, 0, header_of::<P, L>(lanes, b, 0)),
                Unpacked::new(lanes, c, at, 0, header_of::<P, L>(lanes, c, 0)),
                Unpacked::new(lanes, d, at, 0, header_of::<P, L>(lanes, d, 0)),
            ]
        };
        for (factors, vector) in factors.iter_mut().zip(&vectors) {
            for (factor, &of_half) in factors.iter_mut().zip(&vector.scaling.factors) {
                *factor = lanes.to_f32(of_half);
            }
        }
        let words = std::hint::black_box(if layout.halves() { 4 } else { 8 });
        Self { lanes, words, vectors, factors }
    }

    /// Adds the products with `R` rows, of which `x` is the first one's block, to their sums.
    ///
    /// # Safety
    /// Each of the rows has a block, `stride` blocks after that of the row before it.
    #[inline(always)]
    unsafe fn add_rows<const R: usize>(
        &self,
        x: *const ActivationBlock,
        stride: usize,
        sums: &mut [Sums; R],
    ) {
        let (lanes, halves) = (self.lanes, const { P::LAYOUT.halves() });
        let mut rows = [x; R];
        for (r, row) in rows.iter_mut().enumerate() {
            *row = x.wrapping_add(r * stride);
        }
        let mut totals = [[lanes.splat_f32(0.0); TILES]; R];
        for half in 0..if halves { 2 } else { 1 } {
            // SAFETY: the caller's promise is the same.
            let of_half = unsafe { self.code_sums(&rows, half) };
            for (totals, of_half) in totals.iter_mut().zip(&of_half) {
                for (w, total) in totals.iter_mut().enumerate() {
                    let sum = lanes.to_f32(of_half[w]);
                    // The sum of a half times its factor is below 2^24, so that the sum of both is rounded once.
                    *total = match (halves, half) {
                        (false, _) => sum,
                        (true, 0) => lanes.mul_f32(sum, self.factors[w][0]),
                        (true, _) => lanes.mul_add(sum, self.factors[w][1], *total),
                    };
                }
            }
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller vouches for the block.
            let x = Factors::new(lanes, unsafe { &*rows[r] });
            for (w, vector) in self.vectors.iter().enumerate() {
                let to = sums[w * TILE..][..TILE].as_mut_ptr();
                // SAFETY: the slice holds the numbers of a vector.
                unsafe {
                    let acc = lanes.load_f32(to);
                    lanes.store(to, vector.scaling.add(lanes, totals[r][w], &x, acc));
                }
            }
        }
    }

    /// The sums of the codes less their offset, times the codes of x: those of half `half`, where halves have factors.
    ///
    /// # Safety
    /// Each of the rows is a block.
    #[inline(always)]
    unsafe fn code_sums<const R: usize>(
        &self,
        rows: &[*const ActivationBlock; R],
        half: usize,
    ) -> [[L::I; TILES]; R] {
        let (lanes, layout) = (self.lanes, const { P::LAYOUT });
        let mut sums = [[lanes.splat(0); TILES]; R];
        if layout.offset != 0 {
            for (sums, &row) in sums.iter_mut().zip(rows) {
                // SAFETY: the caller vouches for the block.
                let x = unsafe { &*row };
                let sum = match layout.halves() {
                    true => x.minus_halves[half].into(),
                    false => x.minus_sum,
                };
                *sums = [lanes.splat(sum.wrapping_mul(layout.offset)); TILES];
            }
        }
        let mut word = half * self.words;
        let end = word + self.words;
        loop {
            let mut codes = [lanes.splat(0); TILES];
            for (codes, vector) in codes.iter_mut().zip(&self.vectors) {
                // SAFETY: a block has eight words.
                *codes = unsafe { *vector.codes.as_ptr().add(word) };
            }
            for (sums, &row) in sums.iter_mut().zip(rows) {
                // SAFETY: a block begins with its codes, which are eight words.
                let x = lanes.splat(unsafe { row.cast::<i32>().add(word).read_unaligned() });
                for (sum, &codes) in sums.iter_mut().zip(&codes) {
                    *sum = dot::<P, L>(lanes, *sum, codes, x);
                }
            }
            word += 1;
            if word == end {
                return sums;
            }
        }
    }
}

/// Words of four steps whose products with a row are summed in pairs before they are multiplied with a factor, or
/// before 16 bits no longer hold them.
const fn run<P: Packed>() -> usize {
    match most_pairs(P::LAYOUT.dot_bits) {
        8 if P::LAYOUT.halves() => 4,
        most => most,
    }
}

/// Rows that are multiplied at once where there are many; 0 where [`Panel::multiply_in_memory`] is as fast.
const fn tile_rows<P: Packed, L: ByteLanes>() -> usize {
    match (P::LAYOUT.halves(), run::<P>()) {
        _ if L::DOT_OF_FOUR => 0,
        (true, 4) => 0,
        // Sums of pairs and of words both stay in registers so.
        (_, 2) => 2,
        _ => 4,
    }
}

/// Whether codes are multiplied as signed numbers: those of eight bits, of which two products less 128 fit into 16
/// bits.
const fn has_signs<P: Packed, L: ByteLanes>() -> bool {
    P::LAYOUT.dot_bits == 8 && !L::DOT_OF_FOUR
}

/// The products of codes with numbers of x, times factors where there are some.
///
/// # Safety
/// `x` is readable for as many words as there are codes.
#[inline(always)]
unsafe fn dots<P: Packed, L: ByteLanes>(
    lanes: L,
    codes: &[L::I],
    x: *const i32,
    factors: Option<L::I>,
) -> L::I {
    let most = const { most_pairs(P::LAYOUT.dot_bits) };
    let in_pairs = match factors {
        Some(factors) => lanes.pair(factors, factors),
        None => lanes.splat(0x0001_0001),
    };
    let [mut sum, mut pairs] = [lanes.splat(0); 2];
    for (i, &codes_of_four) in codes.iter().enumerate() {
        // SAFETY: the caller vouches for the words.
        let x = lanes.splat(unsafe { x.add(i).read_unaligned() });
        if const { L::DOT_OF_FOUR } {
            sum = dot::<P, L>(lanes, sum, codes_of_four, x);
            continue;
        }
        let more = products_of::<P, L>(lanes, codes_of_four, x);
        pairs = match i % most {
            0 => more,
            _ => lanes.add_pairs(pairs, more),
        };
        if (i + 1) % most == 0 || i + 1 == codes.len() {
            sum = lanes.add(sum, lanes.dot_pairs(pairs, in_pairs));
        }
    }
    match factors {
        Some(factors) if L::DOT_OF_FOUR => lanes.mul(sum, factors),
        _ => sum,
    }
}

/// How many pairs of products of codes of `bits` bits 16 bits hold: 2 * 15 * 127 each, and so on.
const fn most_pairs(bits: usize) -> usize {
    match bits {
        4 => 8,
        5 => 4,
        6 => 2,
        _ => 1,
    }
}

/// The products of codes and x in pairs.
#[inline(always)]
fn products<P: Packed, L: ByteLanes>(lanes: L, codes: L::I, magnitudes: L::I, x: L::I) -> L::I {
    match const { has_signs::<P, L>() } {
        true => lanes.pairs(magnitudes, lanes.with_signs(x, codes)),
        false => lanes.pairs(codes, x),
    }
}

/// The same of codes whose magnitudes nobody has kept.
#[inline(always)]
fn products_of<P: Packed, L: ByteLanes>(lanes: L, codes: L::I, x: L::I) -> L::I {
    let magnitudes = match const { has_signs::<P, L>() } {
        true => lanes.magnitudes(codes),
        false => codes,
    };
    products::<P, L>(lanes, codes, magnitudes, x)
}

/// Adds the products of a unit's block and one row to the sums of the unit's vectors.
///
/// # Safety
/// The unit has codes at `at`; `headers` are its own.
#[inline(always)]
unsafe fn add_one<P: Packed, L: ByteLanes>(
    lanes: L,
    unit: *const u8,
    at: usize,
    headers: &[(L::F, L::F); VECTORS],
    x: &ActivationBlock,
    acc: &mut [L::F; VECTORS],
) {
    let (halves, most) = const { (P::LAYOUT.halves(), most_pairs(P::LAYOUT.dot_bits)) };
    let words = x.codes.as_ptr().cast::<i32>();
    let mut in_pairs = [[lanes.splat(0x0001_0001); 2]; VECTORS];
    let [mut high, mut sums, mut low_pairs, mut upper_pairs] = [[lanes.splat(0); VECTORS]; 4];
    // SAFETY: the caller vouches for the unit, whose parts these are; a block of x has eight words.
    unsafe {
        for (v, in_pairs) in in_pairs.iter_mut().enumerate().take(TILE / L::LANES) {
            if halves {
                let [first, second] = half_factors::<P, L>(lanes, unit, at, v * L::LANES).0;
                *in_pairs = [lanes.pair(first, first), lanes.pair(second, second)];
            }
        }
        for g in 0..4 {
            let x_low = lanes.splat(words.add(g).read_unaligned());
            let x_upper = lanes.splat(words.add(4 + g).read_unaligned());
            for v in 0..TILE / L::LANES {
                let from = unit.add(at + 4 * v * L::LANES);
                let (low, upper) = four_steps::<P, L>(lanes, from, g, &mut high[v]);
                let low = products_of::<P, L>(lanes, low, x_low);
                let upper = products_of::<P, L>(lanes, upper, x_upper);
                if g % most == 0 {
                    (low_pairs[v], upper_pairs[v]) = (low, upper);
                } else {
                    low_pairs[v] = lanes.add_pairs(low_pairs[v], low);
                    upper_pairs[v] = lanes.add_pairs(upper_pairs[v], upper);
                }
                if g < 3 && (g + 1) % most > 0 {
                    continue;
                }
                if !halves && most == 8 {
                    let both = lanes.add_pairs(low_pairs[v], upper_pairs[v]);
                    sums[v] = lanes.dot_pairs(both, in_pairs[v][0]);
                } else {
                    let low = lanes.dot_pairs(low_pairs[v], in_pairs[v][0]);
                    let upper = lanes.dot_pairs(upper_pairs[v], in_pairs[v][1]);
                    sums[v] = lanes.add(sums[v], lanes.add(low, upper));
                }
            }
        }
        let x = Factors::new(lanes, x);
        for v in 0..TILE / L::LANES {
            let scaling = Scaling::<P, L>::new(lanes, unit, at, v * L::LANES, headers[v]);
            let sum = scaling.less_offset(lanes, sums[v], &x);
            acc[v] = scaling.add(lanes, lanes.to_f32(sum), &x, acc[v]);
        }
    }
}

/// What a block of x multiplies the sums of each output with.
struct Factors<L: ByteLanes> {
    scale: L::F,
    sum: L::F,
    /// [`ActivationBlock::minus_halves`].
    minus: L::I,
}

impl<L: ByteLanes> Factors<L> {
    #[inline(always)]
    fn new(lanes: L, x: &ActivationBlock) -> Self {
        Self {
            scale: lanes.splat_f32(x.scale),
            sum: lanes.splat_f32(x.sum),
            minus: lanes.splat(x.minus_pair()),
        }
    }
}

/// What sums of codes times numbers of x are multiplied with, in a vector of outputs.
struct Scaling<P, L: ByteLanes> {
    scale: L::F,
    minimum: L::F,
    /// Of the sums of both halves, where they have some.
    factors: [L::I; 2],
    /// In pairs, of the sums of activations of both halves, where minimums are of halves.
    minimum_factors: L::I,
    format: PhantomData<P>,
}

impl<P: Packed, L: ByteLanes> Scaling<P, L> {
    /// That of a block.
    ///
    /// # Safety
    /// The unit has codes at `at`, and such a lane, whose header this is.
    #[inline(always)]
    unsafe fn new(lanes: L, unit: *const u8, at: usize, lane: usize, header: (L::F, L::F)) -> Self {
        let (mut factors, mut minimum_factors) = ([lanes.splat(0); 2], lanes.splat(0));
        // SAFETY: the caller's promise is the same.
        unsafe {
            if const { P::LAYOUT.halves() } {
                (factors, minimum_factors) = half_factors::<P, L>(lanes, unit, at, lane);
            }
            let (scale, minimum) = scales::<P, L>(lanes, header, unit, at, lane);
            Self { scale, minimum, factors, minimum_factors, format: PhantomData }
        }
    }

    /// What pairs of products add to the sum of a block: those of half `half`, where halves have factors.
    #[inline(always)]
    fn sum(&self, lanes: L, pairs: L::I, half: usize) -> L::I {
        let factor = self.factors[half];
        match const { P::LAYOUT.halves() } {
            true => lanes.dot_pairs(pairs, lanes.pair(factor, factor)),
            false => lanes.dot_pairs(pairs, lanes.splat(0x0001_0001)),
        }
    }

    /// Sums of a block's codes as they are stored, less those of their offset.
    #[inline(always)]
    fn less_offset(&self, lanes: L, sum: L::I, x: &Factors<L>) -> L::I {
        let layout = const { P::LAYOUT };
        if layout.offset == 0 || const { has_signs::<P, L>() } {
            return sum;
        }
        if !layout.halves() {
            let offset = lanes.splat(layout.offset << 16 | layout.offset);
            return lanes.add(sum, lanes.dot_pairs(x.minus, offset));
        }
        let [first, second] = self.factors;
        let minus = lanes.dot_pairs(lanes.pair(first, second), x.minus);
        lanes.add(sum, lanes.mul(minus, lanes.splat(layout.offset)))
    }

    /// `acc` and the sum of a block, rounded.
    #[inline(always)]
    fn add(&self, lanes: L, sum: L::F, x: &Factors<L>, acc: L::F) -> L::F {
        let layout = const { P::LAYOUT };
        let p = lanes.mul_f32(sum, self.scale);
        let acc = lanes.mul_add(p, x.scale, acc);
        if !layout.minimums() {
            return acc;
        }
        if layout.halves() {
            let sums = lanes.to_f32(lanes.dot_pairs(self.minimum_factors, x.minus));
            let sums = lanes.mul_f32(self.minimum, sums);
            return lanes.mul_add(sums, x.scale, acc);
        }
        lanes.mul_add(self.minimum, x.sum, acc)
    }
}

/// The scales and the minimums that a unit has for all of its blocks, vector by vector.
///
/// # Safety
/// It is a unit.
#[inline(always)]
unsafe fn headers<P: Packed, L: ByteLanes>(lanes: L, unit: *const u8) -> [(L::F, L::F); VECTORS] {
    let mut headers = [(lanes.splat_f32(0.0), lanes.splat_f32(0.0)); VECTORS];
    for (v, header) in headers.iter_mut().enumerate().take(TILE / L::LANES) {
        // SAFETY: the caller's promise.
        *header = unsafe { header_of::<P, L>(lanes, unit, v * L::LANES) };
    }
    headers
}

/// Those of the vector from `lane` on.
///
/// # Safety
/// The unit has such a lane.
#[inline(always)]
unsafe fn header_of<P: Packed, L: ByteLanes>(
    lanes: L,
    unit: *const u8,
    lane: usize,
) -> (L::F, L::F) {
    let layout = const { P::LAYOUT };
    // SAFETY: the caller vouches for the unit, whose parts these are.
    unsafe {
        let scale = match layout.scales {
            Scales::PowerOfTwo => lanes.load_e8m0(unit.add(lane)),
            _ => lanes.load_f16(unit.add(2 * lane)),
        };
        let minimum = match layout.minimums() {
            true => lanes.load_f16(unit.add(2 * (TILE + lane))),
            false => lanes.splat_f32(0.0),
        };
        (scale, minimum)
    }
}

/// Scales and minimums of a block in a vector of outputs whose header this is.
///
/// # Safety
/// The unit has codes at `at`, and such a lane.
#[inline(always)]
unsafe fn scales<P: Packed, L: ByteLanes>(
    lanes: L,
    (mut scale, mut minimum): (L::F, L::F),
    unit: *const u8,
    at: usize,
    lane: usize,
) -> (L::F, L::F) {
    let layout = const { P::LAYOUT };
    let factors = unit.wrapping_add(at + layout.codes() + lane);
    // SAFETY: the caller vouches for the unit, whose parts these are.
    unsafe {
        if layout.scales == Scales::Group {
            scale = lanes.mul_f32(scale, lanes.to_f32(lanes.load_i8(factors)));
        }
        if layout.scales == Scales::GroupMinimum {
            scale = lanes.mul_f32(scale, lanes.to_f32(lanes.load_u8(factors)));
            let factor = lanes.sub(lanes.splat(0), lanes.load_u8(factors.add(TILE)));
            minimum = lanes.mul_f32(minimum, lanes.to_f32(factor));
        }
        (scale, minimum)
    }
}

/// What the sums of a block's halves are multiplied with; and in pairs what those of activations are, where
/// minimums are of halves too.
///
/// # Safety
/// The unit has codes at `at`, and such a lane.
#[inline(always)]
unsafe fn half_factors<P: Packed, L: ByteLanes>(
    lanes: L,
    unit: *const u8,
    at: usize,
    lane: usize,
) -> ([L::I; 2], L::I) {
    let from = unit.wrapping_add(at + const { P::LAYOUT.codes() } + lane);
    // SAFETY: the caller vouches for the unit, whose parts these are.
    unsafe {
        if const { !P::LAYOUT.minimums() } {
            let factors = [lanes.load_i8(from), lanes.load_i8(from.add(TILE))];
            return (factors, lanes.splat(0));
        }
        let [first, second] = [lanes.load_u8(from), lanes.load_u8(from.add(TILE))];
        let minimums = lanes.pair(lanes.shift_down::<4>(first), lanes.shift_down::<4>(second));
        let nibble = lanes.splat(15);
        ([lanes.and(first, nibble), lanes.and(second, nibble)], minimums)
    }
}

/// Units of the depth that are added to the sums of `H` rows in a group before it is the next group's
/// turn: the sums of [`MAX_FEW`] rows in all groups do not fit into the registers.
const fn steps<P: Packed, const H: usize>() -> usize {
    if H == MAX_FEW && P::LAYOUT.blocks == 1 { 4 } else { 1 }
}

/// Adds block `b` of a unit.
///
/// # Safety
/// Each of `columns` is a unit and the lane that its vector starts at.
#[inline(always)]
unsafe fn add_block<P: Packed, L: ByteLanes, const H: usize, const W: usize>(
    lanes: L,
    acc: &mut [[L::F; W]; H],
    columns: &[(*const u8, usize); W],
    x: &[*const ActivationBlock; H],
    b: usize,
) {
    let layout = const { P::LAYOUT };
    let at = layout.header() + b * layout.block();
    // SAFETY: the caller vouches for the units, whose parts these are, and for the rows.
    unsafe {
        let sums = code_sums::<P, L, H, W>(lanes, columns, x, at);
        for j in 0..W {
            let (unit, lane) = columns[j];
            let header = header_of::<P, L>(lanes, unit, lane);
            let scaling = Scaling::<P, L>::new(lanes, unit, at, lane, header);
            for r in 0..H {
                let x = Factors::new(lanes, &*x[r]);
                let sum = lanes.to_f32(sums[r][j]);
                acc[r][j] = scaling.add(lanes, sum, &x, acc[r][j]);
            }
        }
    }
}

/// The integer sums of a block: codes less their offset, times the codes of x; with the factors of
/// halves, where there are some.
///
/// # Safety
/// As of [`add_block`]; `at` is where the codes begin in a unit.
#[inline(always)]
unsafe fn code_sums<P: Packed, L: ByteLanes, const H: usize, const W: usize>(
    lanes: L,
    columns: &[(*const u8, usize); W],
    x: &[*const ActivationBlock; H],
    at: usize,
) -> [[L::I; W]; H] {
    let layout = const { P::LAYOUT };
    let halves = const { P::LAYOUT.halves() };
    let offset = |sum: i32| lanes.splat(sum.wrapping_mul(layout.offset));
    let mut first = [[lanes.splat(0); W]; H];
    let mut second = first;
    let mut high = [lanes.splat(0); W];
    // SAFETY: the caller vouches for the units and the rows.
    unsafe {
        if layout.offset != 0 {
            for r in 0..H {
                let x = &*x[r];
                if halves {
                    let [low, upper] = x.minus_halves;
                    (first[r], second[r]) = ([offset(low.into()); W], [offset(upper.into()); W]);
                } else {
                    first[r] = [offset(x.minus_sum); W];
                }
            }
        }
        for g in 0..4 {
            for j in 0..W {
                let codes = columns[j].0.add(at + 4 * columns[j].1);
                let (low, upper) = four_steps::<P, L>(lanes, codes, g, &mut high[j]);
                for r in 0..H {
                    let x = (*x[r]).codes.as_ptr().cast::<i32>();
                    let (x_low, x_upper) = (
                        lanes.splat(x.add(g).read_unaligned()),
                        lanes.splat(x.add(4 + g).read_unaligned()),
                    );
                    first[r][j] = dot::<P, L>(lanes, first[r][j], low, x_low);
                    let to = if halves { &mut second } else { &mut first };
                    to[r][j] = dot::<P, L>(lanes, to[r][j], upper, x_upper);
                }
            }
        }
        if halves {
            for j in 0..W {
                let (unit, lane) = columns[j];
                let [low, upper] = half_factors::<P, L>(lanes, unit, at, lane).0;
                for r in 0..H {
                    let low = lanes.mul(first[r][j], low);
                    first[r][j] = lanes.add(low, lanes.mul(second[r][j], upper));
                }
            }
        }
    }
    first
}

#[inline(always)]
fn dot<P: Packed, L: ByteLanes>(lanes: L, acc: L::I, codes: L::I, x: L::I) -> L::I {
    if const { P::LAYOUT.dot_bits } == 8 {
        lanes.dot_bytes(acc, codes, x)
    } else {
        lanes.dot_codes(acc, codes, x)
    }
}

/// What codes are looked up in, if they are.
const fn table<P: Packed, L: ByteLanes>() -> Option<[u8; 16]> {
    let (mut table, mut i) = (P::LAYOUT.table, 0);
    if let Some(table) = &mut table
        && has_signs::<P, L>()
    {
        while i < table.len() {
            table[i] = table[i].wrapping_sub(128);
            i += 1;
        }
    }
    table
}

/// The codes of steps `4 g..` and `16 + 4 g..`; `high` is what is left of the upper bits.
///
/// # Safety
/// The codes of 32 steps begin at `codes`.
#[inline(always)]
unsafe fn four_steps<P: Packed, L: ByteLanes>(
    lanes: L,
    codes: *const u8,
    g: usize,
    high: &mut L::I,
) -> (L::I, L::I) {
    let bits = const { P::LAYOUT.bits };
    // SAFETY: the caller vouches for the codes.
    unsafe {
        if bits < 4 {
            let mut packed = lanes.load(codes.add(64 * (g / 2)));
            if g % 2 == 1 {
                packed = lanes.shift_down::<4>(packed);
            }
            let pairs = lanes.splat(0x0303_0303);
            let low = lanes.and(packed, pairs);
            let upper = lanes.and(lanes.shift_down::<2>(packed), pairs);
            if bits == 2 {
                return (low, upper);
            }
            if g == 0 {
                *high = lanes.load(codes.add(128));
            }
            let third = lanes.splat(0x0404_0404);
            let low = lanes.or(low, lanes.and(lanes.shift_up::<2>(*high), third));
            let upper = lanes.or(upper, lanes.and(lanes.shift_down::<2>(*high), third));
            *high = lanes.shift_down::<1>(*high);
            return (low, upper);
        }
        let vector = |g: usize| lanes.load(codes.add(64 * g));
        let packed = vector(g);
        if bits == 8 {
            let both = (packed, vector(4 + g));
            return match const { has_signs::<P, L>() } {
                true => (lanes.less_128(both.0), lanes.less_128(both.1)),
                false => both,
            };
        }
        if bits == 6 {
            let six = lanes.splat(0x3f3f_3f3f);
            let upper = match g {
                0 | 1 => lanes.and(vector(4 + g), six),
                _ => {
                    let first = 3 * (g - 2);
                    let a = lanes.shift_down::<6>(vector(first));
                    let b = lanes.shift_down::<4>(vector(first + 1));
                    let c = lanes.shift_down::<2>(vector(first + 2));
                    let a = lanes.and(a, lanes.splat(0x0303_0303));
                    let b = lanes.and(b, lanes.splat(0x0c0c_0c0c));
                    lanes.or(lanes.or(a, b), lanes.and(c, lanes.splat(0x3030_3030)))
                }
            };
            return (lanes.and(packed, six), upper);
        }
        let nibbles = lanes.splat(0x0f0f_0f0f);
        let low = lanes.and(packed, nibbles);
        let upper = lanes.and(lanes.shift_down::<4>(packed), nibbles);
        if let Some(table) = const { &table::<P, L>() } {
            return (lanes.lookup(table, low), lanes.lookup(table, upper));
        }
        if bits == 4 {
            return (low, upper);
        }
        if g == 0 {
            *high = vector(4);
        }
        let fifth = lanes.splat(0x1010_1010);
        let low = lanes.or(low, lanes.and(lanes.shift_up::<4>(*high), fifth));
        let upper = lanes.or(upper, lanes.and(*high, fifth));
        *high = lanes.shift_down::<1>(*high);
        (low, upper)
    }
}
