//! Layers without a weight matrix: norms, gates and rotary positions.

use std::ops::Range;

use prefixcache_cpu::lanes::vectors;
use prefixcache_cpu::{Element, Form, Kernel, Lanes, Rows, RowsMut, Team};

/// x / sqrt(mean(x^2) + eps) * (weight + offset), for each `group` numbers of a row.
///
/// A row of one group is the usual norm; a row of several is the norm of each head. The weight
/// spans one group or several and is repeated along the row. Computed in `f32`, rounded once.
#[derive(Clone, Copy)]
pub struct RmsNorm<'a, E> {
    /// What each number is scaled by.
    pub weight: &'a [E],
    /// Added to each weight: 1 in Gemma, whose checkpoints hold weights around 0.
    pub offset: f32,
    /// Numbers that share a mean square.
    pub group: usize,
    /// Added to the mean square.
    pub eps: f32,
}

/// Writes the norm of each row of x, plus that of the residual, to `out`.
///
/// The norm is rounded before the residual is added, and the sum again: the bits of a norm and a
/// sum that follow each other.
///
/// # Panics
/// The shapes do not fit.
pub fn rms_norm<E: Element, O: Element>(
    form: Form,
    team: &Team,
    norm: RmsNorm<'_, E>,
    x: Rows<'_, E>,
    residual: Option<Rows<'_, O>>,
    out: &RowsMut<'_, O>,
) {
    let (width, weights) = (x.width(), norm.weight.len());
    assert_eq!(x.shape(), out.shape(), "shape of out");
    assert!(width.is_multiple_of(weights), "width of the weight");
    assert!(weights.is_multiple_of(norm.group), "width of a group");
    if let Some(residual) = &residual {
        assert_eq!(residual.shape(), out.shape(), "residual");
    }
    each_row(form, team, width, out, &NormedRow { norm, x, residual });
}

/// The function between the two halves of a gated layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// x / (1 + e^-x)
    Silu,
    /// x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3): gelu in its tanh form.
    GeluTanh,
    /// x / (1 + e^-1.702 x) of gates x up to 7, times the second half, kept within -7 and 7, plus 1.
    ClampedSwiglu,
    /// max(x, 0) of x itself: the square of what is above 0, without a second half.
    SquaredRelu,
}

impl Gate {
    /// How many times as wide a row is as what becomes of it.
    pub fn width(self) -> usize {
        if self == Self::SquaredRelu { 1 } else { 2 }
    }
}

/// gate(first half of the row) * second half, where it has one.
///
/// # Panics
/// A row of x is not [`Gate::width`] times as wide as one of `out`.
pub fn gated<E: Element>(
    form: Form,
    team: &Team,
    gate: Gate,
    x: Rows<'_, E>,
    out: &RowsMut<'_, E>,
) {
    let width = gate.width() * out.width();
    assert_eq!(x.shape(), (out.rows(), width), "shape of x");
    each_row(form, team, width, out, &Gated { gate, x });
}

/// x / (1 + e^-gate), number by number: x times the sigmoid of its gate.
///
/// # Panics
/// The shapes do not fit.
pub fn open<E: Element>(
    form: Form,
    team: &Team,
    gates: Rows<'_, E>,
    x: Rows<'_, E>,
    out: &RowsMut<'_, E>,
) {
    assert_eq!(gates.shape(), x.shape(), "shape of gates");
    assert_eq!(x.shape(), out.shape(), "shape of out");
    each_row(form, team, x.width(), out, &Opened { gates, x });
}

/// Turns the first numbers of each head of a row by the row's angles: halves (x, y) of them become
/// (x cos - y sin, y cos + x sin). A head has `head` numbers, of which the others are copied.
///
/// A row of `cos` and one of `sin` belong to each row of x, and are half as wide as what is turned.
///
/// # Panics
/// The shapes do not fit.
pub fn rotate<E: Element>(
    form: Form,
    team: &Team,
    cos: Rows<'_, f32>,
    sin: Rows<'_, f32>,
    head: usize,
    x: Rows<'_, E>,
    out: &RowsMut<'_, E>,
) {
    assert_eq!(cos.shape(), sin.shape(), "shape of sin");
    assert_eq!(x.shape(), out.shape(), "shape of out");
    assert_eq!(cos.rows(), x.rows(), "rows of cos");
    assert!(2 * cos.width() <= head, "width of cos");
    assert!(x.width().is_multiple_of(head), "width of x");
    each_row(form, team, x.width(), out, &Rotate { cos, sin, head, x });
}

/// What a layer makes of one row.
pub(crate) trait RowWork<O: Element>: Sync {
    /// Whether numbers of bfloat16 are read or written.
    const HAS_BF16: bool = O::PER_WORD > 1;

    /// Writes row `row` of `out`.
    fn run<L: Lanes>(&self, lanes: L, row: usize, out: &mut [O]);
}

/// Writes all rows of `out`, each of which is made of `width` numbers.
pub(crate) fn each_row<O: Element>(
    form: Form,
    team: &Team,
    width: usize,
    out: &RowsMut<'_, O>,
    work: &impl RowWork<O>,
) {
    if out.width() > 0 {
        team.run_rows(out.rows(), width, |rows| form.run(Chunk { work, out, rows }));
    }
}

/// The rows of one task.
struct Chunk<'a, O, W> {
    work: &'a W,
    out: &'a RowsMut<'a, O>,
    rows: Range<usize>,
}

impl<O: Element, W: RowWork<O>> Kernel for Chunk<'_, O, W> {
    type Output = ();

    const HAS_BF16: bool = W::HAS_BF16;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for row in self.rows {
            // SAFETY: a row belongs to one task.
            let out = unsafe { self.out.part(row, 0, self.out.width()) };
            self.work.run(lanes, row, out);
        }
    }
}

/// Adds rows to those of x, where there are some, then multiplies each number, in place.
///
/// The sum is rounded before it is multiplied.
///
/// # Panics
/// The shapes do not fit.
pub fn add_and_scale<E: Element>(
    form: Form,
    team: &Team,
    more: Option<Rows<'_, E>>,
    factor: f32,
    x: &mut RowsMut<'_, E>,
) {
    assert!(more.is_none_or(|more| more.shape() == x.shape()), "shape");
    each_row(form, team, x.width(), x, &Scaled { more, factor });
}

struct Scaled<'a, E> {
    more: Option<Rows<'a, E>>,
    factor: f32,
}

impl<E: Element> RowWork<E> for Scaled<'_, E> {
    #[inline(always)]
    fn run<L: Lanes>(&self, lanes: L, row: usize, x: &mut [E]) {
        let factor = lanes.splat(self.factor);
        if let Some(more) = &self.more {
            add(lanes, more.row(row), x);
        }
        for (at, count) in vectors::<L>(x.len()) {
            let to = x[at..].as_mut_ptr();
            // SAFETY: `count` numbers stand at `at`.
            unsafe {
                let y = lanes.mul(E::load_some(lanes, to, count), factor);
                E::store_some(lanes, to, y, count);
            }
        }
    }
}

/// Replaces each number x by `cap * tanh(x / cap)`, in place.
pub fn softcap(form: Form, team: &Team, cap: f32, x: &mut RowsMut<'_, f32>) {
    each_row(form, team, x.width(), x, &Capped { cap });
}

struct Capped {
    cap: f32,
}

impl RowWork<f32> for Capped {
    #[inline(always)]
    fn run<L: Lanes>(&self, lanes: L, _row: usize, x: &mut [f32]) {
        let cap = lanes.splat(self.cap);
        for (at, count) in vectors::<L>(x.len()) {
            let to = x[at..].as_mut_ptr();
            // SAFETY: `count` numbers stand at `at`.
            unsafe {
                let scaled = lanes.div(f32::load_some(lanes, to, count), cap);
                let y = lanes.mul(cap, lanes.tanh(scaled));
                f32::store_some(lanes, to, y, count);
            }
        }
    }
}

struct NormedRow<'a, E, O> {
    norm: RmsNorm<'a, E>,
    x: Rows<'a, E>,
    residual: Option<Rows<'a, O>>,
}

impl<E: Element, O: Element> RowWork<O> for NormedRow<'_, E, O> {
    const HAS_BF16: bool = E::PER_WORD > 1 || O::PER_WORD > 1;

    #[inline(always)]
    fn run<L: Lanes>(&self, lanes: L, row: usize, out: &mut [O]) {
        let RmsNorm { weight, group, .. } = self.norm;
        let groups = self.x.row(row).chunks_exact(group).zip(out.chunks_exact_mut(group));
        for ((x, out), weight) in groups.zip(weight.chunks_exact(group).cycle()) {
            self.norm.run_group(lanes, x, weight, out);
        }
        if let Some(residual) = &self.residual {
            add(lanes, residual.row(row), out);
        }
    }
}

impl<E: Element> RmsNorm<'_, E> {
    #[inline(always)]
    fn run_group<L: Lanes, O: Element>(&self, lanes: L, x: &[E], weight: &[E], out: &mut [O]) {
        let scale = lanes.splat(1.0 / (mean_square(lanes, x) + self.eps).sqrt());
        // Adding -0 changes no number, while adding 0 makes 0 of a weight of -0.
        let offset = lanes.splat(if self.offset == 0.0 { -0.0 } else { self.offset });
        for (at, count) in vectors::<L>(x.len()) {
            // SAFETY: `count` numbers stand at `at` in each of the three, which are equally long.
            unsafe {
                let v = E::load_some(lanes, x[at..].as_ptr(), count);
                let w = E::load_some(lanes, weight[at..].as_ptr(), count);
                let y = lanes.mul(lanes.mul(v, scale), lanes.add(w, offset));
                O::store_some(lanes, out[at..].as_mut_ptr(), y, count);
            }
        }
    }
}

#[inline(always)]
fn mean_square<E: Element, L: Lanes>(lanes: L, x: &[E]) -> f32 {
    let mut squares = lanes.splat(0.0);
    for (at, count) in vectors::<L>(x.len()) {
        // SAFETY: `count` numbers stand at `at`.
        let v = unsafe { E::load_some(lanes, x[at..].as_ptr(), count) };
        squares = lanes.mul_add(v, v, squares);
    }
    lanes.sum(squares) / x.len() as f32
}

/// Adds a row to another.
#[inline(always)]
fn add<E: Element, L: Lanes>(lanes: L, row: &[E], out: &mut [E]) {
    for (at, count) in vectors::<L>(out.len()) {
        // SAFETY: `count` numbers stand at `at` in both, which are equally long.
        unsafe {
            let v = E::load_some(lanes, row[at..].as_ptr(), count);
            let to = out[at..].as_mut_ptr();
            let sum = lanes.add(v, E::load_some(lanes, to, count));
            E::store_some(lanes, to, sum, count);
        }
    }
}

struct Gated<'a, E> {
    gate: Gate,
    x: Rows<'a, E>,
}

impl<E: Element> RowWork<E> for Gated<'_, E> {
    #[inline(always)]
    fn run<L: Lanes>(&self, lanes: L, row: usize, out: &mut [E]) {
        let x = self.x.row(row);
        let (gates, values) = (&x[..out.len()], &x[x.len() - out.len()..]);
        self.gate.pass(lanes, gates, values, out);
    }
}

/// Columns of some rows of a gated layer, whose gates and values other threads may have written before.
pub(crate) struct GatedPart<'a, E> {
    gate: Gate,
    wide: &'a RowsMut<'a, E>,
    out: &'a RowsMut<'a, E>,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl<'a, E: Element> GatedPart<'a, E> {
    /// Columns `columns` of rows `rows` of `out`, of x in `wide`: see [`gated`].
    ///
    /// # Safety
    /// While it is used, nobody else uses that part of `out`, and nobody writes what it is made of.
    pub(crate) unsafe fn new(
        gate: Gate,
        wide: &'a RowsMut<'a, E>,
        out: &'a RowsMut<'a, E>,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Self {
        Self { gate, wide, out, rows, columns }
    }
}

impl<E: Element> Kernel for GatedPart<'_, E> {
    type Output = ();

    const HAS_BF16: bool = E::PER_WORD > 1;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let (first, count) = (self.columns.start, self.columns.len());
        let second = self.wide.width() - self.out.width() + first;
        for row in self.rows {
            // SAFETY: the maker vouches for all three.
            let (gates, values, out) = unsafe {
                (
                    self.wide.shared_part(row, first, count),
                    self.wide.shared_part(row, second, count),
                    self.out.part(row, first, count),
                )
            };
            self.gate.pass(lanes, gates, values, out);
        }
    }
}

impl Gate {
    /// Writes what the gates let pass of the values.
    #[inline(always)]
    fn pass<E: Element, L: Lanes>(self, lanes: L, gates: &[E], values: &[E], out: &mut [E]) {
        for (at, count) in vectors::<L>(values.len()) {
            // SAFETY: `count` numbers stand at `at` in each of the three.
            unsafe {
                let x = E::load_some(lanes, gates[at..].as_ptr(), count);
                let v = E::load_some(lanes, values[at..].as_ptr(), count);
                let y = match self {
                    Gate::ClampedSwiglu => clamped_swiglu(lanes, x, v),
                    gate => lanes.mul(opened(lanes, gate, x), v),
                };
                E::store_some(lanes, out[at..].as_mut_ptr(), y, count);
            }
        }
    }
}

/// gate(x), as x / (1 + e^-t).
#[inline(always)]
fn opened<L: Lanes>(lanes: L, gate: Gate, x: L::V) -> L::V {
    /// 2 sqrt(2 / pi)
    const SLOPE: f32 = 1.595_769;
    let minus_t = match gate {
        Gate::ClampedSwiglu => lanes.mul(lanes.splat(-SWIGLU_SLOPE), x),
        Gate::SquaredRelu => return lanes.max(x, lanes.splat(0.0)),
        Gate::Silu => lanes.sub(lanes.splat(0.0), x),
        Gate::GeluTanh => {
            let square = lanes.mul(x, x);
            let cubic = lanes.mul_add(square, lanes.splat(-0.044715 * SLOPE), lanes.splat(-SLOPE));
            lanes.mul(cubic, x)
        }
    };
    lanes.times_sigmoid(x, minus_t)
}

struct Opened<'a, E> {
    gates: Rows<'a, E>,
    x: Rows<'a, E>,
}

impl<E: Element> RowWork<E> for Opened<'_, E> {
    #[inline(always)]
    fn run<L: Lanes>(&self, lanes: L, row: usize, out: &mut [E]) {
        let (gates, x) = (self.gates.row(row), self.x.row(row));
        for (at, count) in vectors::<L>(out.len()) {
            // SAFETY: `count` numbers stand at `at` in each of the three, which are equally long.
            unsafe {
                let gate = E::load_some(lanes, gates[at..].as_ptr(), count);
                let x = E::load_some(lanes, x[at..].as_ptr(), count);
                let y = lanes.times_sigmoid(x, lanes.sub(lanes.splat(0.0), gate));
                E::store_some(lanes, out[at..].as_mut_ptr(), y, count);
            }
        }
    }
}

/// What opens the gates of [`Gate::ClampedSwiglu`], before e.
const SWIGLU_SLOPE: f32 = 1.702;

/// Where its numbers are cut off.
const SWIGLU_LIMIT: f32 = 7.0;

#[inline(always)]
fn clamped_swiglu<L: Lanes>(lanes: L, gate: L::V, value: L::V) -> L::V {
    let limit = lanes.splat(SWIGLU_LIMIT);
    let value = lanes.max(lanes.min(value, limit), lanes.splat(-SWIGLU_LIMIT));
    let opened = opened(lanes, Gate::ClampedSwiglu, lanes.min(gate, limit));
    lanes.mul(opened, lanes.add(value, lanes.splat(1.0)))
}

struct Rotate<'a, E> {
    cos: Rows<'a, f32>,
    sin: Rows<'a, f32>,
    head: usize,
    x: Rows<'a, E>,
}

impl<E: Element> RowWork<E> for Rotate<'_, E> {
    #[inline(always)]
    fn run<L: Lanes>(&self, lanes: L, row: usize, out: &mut [E]) {
        let (cos, sin) = (self.cos.row(row), self.sin.row(row));
        let heads = self.x.row(row).chunks_exact(self.head).zip(out.chunks_exact_mut(self.head));
        for (head, out) in heads {
            let (turned, copied) = head.split_at(2 * cos.len());
            let (out, rest) = out.split_at_mut(turned.len());
            rotate_head(lanes, turned, cos, sin, out);
            rest.copy_from_slice(copied);
        }
    }
}

#[inline(always)]
fn rotate_head<E: Element, L: Lanes>(
    lanes: L,
    head: &[E],
    cos: &[f32],
    sin: &[f32],
    out: &mut [E],
) {
    let (left, right) = head.split_at(cos.len());
    let (out_left, out_right) = out.split_at_mut(cos.len());
    for (at, count) in vectors::<L>(cos.len()) {
        // SAFETY: `count` numbers stand at `at` in each of the six, which are equally long.
        unsafe {
            let x = E::load_some(lanes, left[at..].as_ptr(), count);
            let y = E::load_some(lanes, right[at..].as_ptr(), count);
            let c = f32::load_some(lanes, cos[at..].as_ptr(), count);
            let s = f32::load_some(lanes, sin[at..].as_ptr(), count);
            let turned_x = lanes.sub(lanes.mul(x, c), lanes.mul(y, s));
            let turned_y = lanes.add(lanes.mul(y, c), lanes.mul(x, s));
            E::store_some(lanes, out_left[at..].as_mut_ptr(), turned_x, count);
            E::store_some(lanes, out_right[at..].as_mut_ptr(), turned_y, count);
        }
    }
}
