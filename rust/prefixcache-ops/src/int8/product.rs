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
        form.run(PanelTask {
            weight: self,
            panel,
            x,
            first,
            sums,
        });
    }
}

/// Rows whose sums are kept in memory while a panel is multiplied: with its codes they stay in the first
/// cache.
const SUMMED_ROWS: usize = 24;

/// A format as a type, so that a kernel is compiled for it.
trait Packed {
    const LAYOUT: Layout;
    /// See [`Format::is_common`].
    const IS_COMMON: bool;

    /// [`ByteLanes::dots`] of its codes.
    ///
    /// # Safety
    /// `x` is readable for `N` words.
    unsafe fn dots<L: ByteLanes, const N: usize>(
        lanes: L,
        codes: &[L::I; N],
        x: *const i32,
    ) -> L::I;
}

macro_rules! formats {
    ($($name:ident),*) => {
        $(
            struct $name;
            impl Packed for $name {
                const LAYOUT: Layout = Layout::of(Format::$name);
                const IS_COMMON: bool = Format::$name.is_common();

                #[inline(always)]
                unsafe fn dots<L: ByteLanes, const N: usize>(
                    lanes: L,
                    codes: &[L::I; N],
                    x: *const i32,
                ) -> L::I {
                    const BITS: usize = Layout::of(Format::$name).dot_bits;
                    // SAFETY: the caller's promise is the same.
                    unsafe { lanes.dots::<BITS, N>(codes, x) }
                }
            }
        )*

        impl ByteKernel for PanelTask<'_> {
            type Output = ();

            #[inline(always)]
            fn run<L: ByteLanes>(self, lanes: L) {
                match self.weight.format() {
                    $(Format::$name => self.of_format::<$name, L>(lanes),)*
                }
            }
        }
    };
}

formats!(
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4K, Q5K, Q6K, Q2K, Q3K, IQ4NL, IQ4XS, MXFP4
);

/// One panel times a few rows.
struct PanelTask<'a> {
    weight: &'a Int8Weight,
    panel: usize,
    x: &'a QuantizedRows,
    first: usize,
    sums: &'a mut [Sums],
}

impl PanelTask<'_> {
    #[inline(always)]
    fn of_format<P: Packed, L: ByteLanes>(self, lanes: L) {
        let panel = Panel::<P, L>::new(lanes, self.weight, self.panel);
        let mut first = self.first;
        // A kernel for each number of rows is compiled for the formats that most files are made of.
        if const { !L::DOT_OF_FOUR || !P::IS_COMMON } {
            for sums in self.sums.chunks_mut(SUMMED_ROWS) {
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
        // SAFETY: a row of x has the blocks of the panel's depth.
        unsafe {
            if const { L::LANES < TILE } {
                self.sums::<H, 2, TILES>(rows, sums);
            } else if const { H == 1 || H > MAX_HEIGHT } || self.width < TILES {
                self.sums::<H, 1, TILES>(rows, sums);
            } else if const { P::LAYOUT.halves() && H > 2 } {
                // With sums of halves more would not fit into the registers.
                self.sums::<H, 2, 2>(rows, sums);
            } else {
                self.sums::<H, TILES, 1>(rows, sums);
            }
        }
    }

    /// Multiplies it with some rows, whose sums are in memory: what takes the time is to unpack codes and to
    /// multiply them.
    #[inline(always)]
    fn multiply_in_memory(&self, x: &QuantizedRows, first: usize, sums: &mut [Sums]) {
        let layout = const { P::LAYOUT };
        sums.fill([0.0; PANEL]);
        // Whole steps of the depth: in between are the units of other columns, which come before.
        let ahead = AHEAD.next_multiple_of(self.width * layout.unit());
        for d in 0..self.depth {
            for b in 0..layout.blocks {
                for column in (0..self.width * TILE).step_by(L::LANES) {
                    let unit = d * self.width + column / TILE;
                    let unit = self.units.wrapping_add(unit * layout.unit());
                    let at = layout.header() + b * layout.block();
                    let lane = column % TILE;
                    if lane == 0 {
                        for line in (0..layout.block()).step_by(LINE) {
                            self.lanes.prefetch(unit.wrapping_add(at + ahead + line));
                        }
                    }
                    // SAFETY: the panel has the unit with its block, and each row as many blocks.
                    unsafe {
                        let block = Unpacked::<P, L>::new(self.lanes, unit, at, lane);
                        for (row, sums) in (first..).zip(&mut *sums) {
                            let x = &x.row(row)[d * layout.blocks + b];
                            let to = sums[column..][..L::LANES].as_mut_ptr();
                            block.add_row(self.lanes, x, to);
                        }
                    }
                }
            }
        }
    }

    /// Asks for what lies `ahead` of a block in `W` vectors: a few rows wait for memory otherwise.
    #[inline(always)]
    fn fetch<const W: usize>(&self, d: usize, group: usize, b: usize, ahead: usize) {
        let layout = const { P::LAYOUT };
        let bytes = W * L::LANES / TILE * (layout.unit() / layout.blocks);
        let unit = d * self.width + group * W * L::LANES / TILE;
        let at = self
            .units
            .wrapping_add(unit * layout.unit() + b * bytes + ahead);
        for line in 0..bytes.div_ceil(LINE) {
            self.lanes.prefetch(at.wrapping_add(line * LINE));
        }
    }

    /// Writes the sums of `H` rows, in up to `G` groups of `W` vectors of outputs.
    ///
    /// # Safety
    /// Each row has the blocks of the panel's depth, and the panel's units are whole groups.
    #[inline(always)]
    unsafe fn sums<const H: usize, const W: usize, const G: usize>(
        &self,
        rows: [*const ActivationBlock; H],
        sums: &mut [Sums],
    ) {
        let (lanes, layout) = (self.lanes, const { P::LAYOUT });
        let outputs = W * L::LANES;
        let groups = if W * G == TILES && L::LANES == TILE {
            G
        } else {
            self.width * TILE / outputs
        };
        let mut acc = [[[lanes.splat_f32(0.0); W]; H]; G];
        let steps = const { steps::<P, H>() };
        let ahead = if steps == 1 {
            AHEAD
        } else {
            steps * self.width * layout.unit()
        };
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
    scale: L::F,
    minimum: L::F,
    /// What sums of halves are multiplied with, where there is such.
    factors: [L::I; 2],
    /// What their sums of activations are multiplied with, where minimums are of halves.
    minimum_factors: [L::I; 2],
    format: PhantomData<P>,
}

impl<P: Packed, L: ByteLanes> Unpacked<P, L> {
    /// # Safety
    /// The unit has codes at `at`, and such a lane.
    #[inline(always)]
    unsafe fn new(lanes: L, unit: *const u8, at: usize, lane: usize) -> Self {
        let layout = const { P::LAYOUT };
        let mut codes = [lanes.splat(0); 8];
        let mut factors = [lanes.splat(0); 2];
        let mut minimum_factors = factors;
        let mut high = codes[0];
        // SAFETY: the caller vouches for the unit, whose parts these are.
        unsafe {
            for g in 0..4 {
                let from = unit.add(at + 4 * lane);
                (codes[g], codes[4 + g]) = four_steps::<P, L>(lanes, from, g, &mut high);
            }
            let (scale, minimum) = scales::<P, L>(lanes, unit, at, lane);
            if layout.halves() {
                (factors, minimum_factors) = half_factors::<P, L>(lanes, unit, at, lane);
            }
            Self {
                codes,
                scale,
                minimum,
                factors,
                minimum_factors,
                format: PhantomData,
            }
        }
    }

    /// Adds the products with a row's block to its sums.
    ///
    /// # Safety
    /// A vector of sums lies at `to`.
    #[inline(always)]
    unsafe fn add_row(&self, lanes: L, x: &ActivationBlock, to: *mut f32) {
        let layout = const { P::LAYOUT };
        let words = x.codes.as_ptr().cast::<i32>();
        let offset = match layout.dot_bits {
            8 if L::DOTS_LESS_128 => 0,
            _ => layout.offset,
        };
        // SAFETY: a block of x has eight words, and the caller vouches for the sums.
        unsafe {
            let sum = if layout.halves() {
                let minus = x.minus_halves();
                let mut both = lanes.splat(0);
                for (i, codes) in self.codes.as_chunks::<4>().0.iter().enumerate() {
                    let sum = P::dots::<L, 4>(lanes, codes, words.add(4 * i));
                    let sum = lanes.add(sum, lanes.splat(minus[i] * offset));
                    both = lanes.add(both, lanes.mul(sum, self.factors[i]));
                }
                both
            } else {
                let sum = P::dots::<L, 8>(lanes, &self.codes, words);
                match offset {
                    0 => sum,
                    _ => lanes.add(sum, lanes.splat(x.minus_sum * offset)),
                }
            };
            let p = lanes.mul_f32(lanes.to_f32(sum), self.scale);
            let mut acc = lanes.mul_add(p, lanes.splat_f32(x.scale), lanes.load_f32(to));
            if layout.minimums() && layout.halves() {
                let sums = minus_sums(lanes, self.minimum_factors, x);
                let sums = lanes.mul_f32(self.minimum, lanes.to_f32(sums));
                acc = lanes.mul_add(sums, lanes.splat_f32(x.scale), acc);
            } else if layout.minimums() {
                acc = lanes.mul_add(self.minimum, lanes.splat_f32(x.sum), acc);
            }
            lanes.store(to, acc);
        }
    }
}

/// Scales and minimums of a block in a vector of outputs.
///
/// # Safety
/// The unit has codes at `at`, and such a lane.
#[inline(always)]
unsafe fn scales<P: Packed, L: ByteLanes>(
    lanes: L,
    unit: *const u8,
    at: usize,
    lane: usize,
) -> (L::F, L::F) {
    let layout = const { P::LAYOUT };
    // SAFETY: the caller vouches for the unit, whose parts these are.
    unsafe {
        let mut scale = match layout.scales {
            Scales::PowerOfTwo => lanes.load_e8m0(unit.add(lane)),
            _ => lanes.load_f16(unit.add(2 * lane)),
        };
        let mut minimum = lanes.splat_f32(0.0);
        if layout.minimums() {
            minimum = lanes.load_f16(unit.add(2 * (TILE + lane)));
        }
        if layout.scales == Scales::Group {
            let factors = unit.add(at + layout.codes() + lane);
            scale = lanes.mul_f32(scale, lanes.to_f32(lanes.load_i8(factors)));
        }
        if layout.scales == Scales::GroupMinimum {
            let factors = unit.add(at + layout.codes() + lane);
            scale = lanes.mul_f32(scale, lanes.to_f32(lanes.load_u8(factors)));
            let factor = lanes.sub(lanes.splat(0), lanes.load_u8(factors.add(TILE)));
            minimum = lanes.mul_f32(minimum, lanes.to_f32(factor));
        }
        (scale, minimum)
    }
}

/// What the sums of a block's halves are multiplied with, and those of activations where minimums are of
/// halves too.
///
/// # Safety
/// The unit has codes at `at`, and such a lane.
#[inline(always)]
unsafe fn half_factors<P: Packed, L: ByteLanes>(
    lanes: L,
    unit: *const u8,
    at: usize,
    lane: usize,
) -> ([L::I; 2], [L::I; 2]) {
    let from = unit.wrapping_add(at + const { P::LAYOUT.codes() } + lane);
    // SAFETY: the caller vouches for the unit, whose parts these are.
    unsafe {
        if const { !P::LAYOUT.minimums() } {
            let factors = [lanes.load_i8(from), lanes.load_i8(from.add(TILE))];
            return (factors, [lanes.splat(0); 2]);
        }
        let [first, second] = [lanes.load_u8(from), lanes.load_u8(from.add(TILE))];
        let nibble = lanes.splat(15);
        (
            [lanes.and(first, nibble), lanes.and(second, nibble)],
            [lanes.shift_down::<4>(first), lanes.shift_down::<4>(second)],
        )
    }
}

/// Minus the sums of the codes of x in both halves, times the factors of their minimums.
#[inline(always)]
fn minus_sums<L: ByteLanes>(lanes: L, factors: [L::I; 2], x: &ActivationBlock) -> L::I {
    let [first, second] = x.minus_halves();
    let first = lanes.mul(factors[0], lanes.splat(first));
    lanes.add(first, lanes.mul(factors[1], lanes.splat(second)))
}

/// Units of the depth that are added to the sums of `H` rows in a group before it is the next group's
/// turn: the sums of [`MAX_FEW`] rows in all groups do not fit into the registers.
const fn steps<P: Packed, const H: usize>() -> usize {
    if H == MAX_FEW && P::LAYOUT.blocks == 1 {
        4
    } else {
        1
    }
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
            let (scale, minimum) = scales::<P, L>(lanes, unit, at, lane);
            for r in 0..H {
                let x = &*x[r];
                let p = lanes.mul_f32(lanes.to_f32(sums[r][j]), scale);
                acc[r][j] = lanes.mul_add(p, lanes.splat_f32(x.scale), acc[r][j]);
                if layout.minimums() && layout.halves() {
                    let factors = half_factors::<P, L>(lanes, unit, at, lane).1;
                    let sums = lanes.to_f32(minus_sums(lanes, factors, x));
                    let sums = lanes.mul_f32(minimum, sums);
                    acc[r][j] = lanes.mul_add(sums, lanes.splat_f32(x.scale), acc[r][j]);
                } else if layout.minimums() {
                    acc[r][j] = lanes.mul_add(minimum, lanes.splat_f32(x.sum), acc[r][j]);
                }
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
                    let minus = x.minus_halves();
                    (first[r], second[r]) = ([offset(minus[0]); W], [offset(minus[1]); W]);
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
        let packed = lanes.load(codes.add(64 * g));
        if bits == 8 {
            return (packed, lanes.load(codes.add(64 * (4 + g))));
        }
        let nibbles = lanes.splat(0x0f0f_0f0f);
        let low = lanes.and(packed, nibbles);
        let upper = lanes.and(lanes.shift_down::<4>(packed), nibbles);
        if let Some(table) = const { &P::LAYOUT.table } {
            return (lanes.lookup(table, low), lanes.lookup(table, upper));
        }
        if bits == 4 {
            return (low, upper);
        }
        let planes = bits - 4;
        if (g * planes).is_multiple_of(4) {
            *high = lanes.load(codes.add(256 + 64 * (g * planes / 4)));
        }
        let mask = lanes.splat(if planes == 1 {
            0x1010_1010
        } else {
            0x3030_3030
        });
        let low = lanes.or(low, lanes.and(lanes.shift_up::<4>(*high), mask));
        let upper = lanes.or(upper, lanes.and(*high, mask));
        *high = match planes {
            1 => lanes.shift_down::<1>(*high),
            _ => lanes.shift_down::<2>(*high),
        };
        (low, upper)
    }
}
