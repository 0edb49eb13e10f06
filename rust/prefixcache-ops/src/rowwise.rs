//! Layers without a weight matrix: norms, gates and rotary positions.

use std::ops::Range;

use prefixcache_cpu::{Element, Form, Kernel, Lanes, Rows, RowsMut, Team};

/// Numbers that a task should have, so that waking a thread pays.
const TASK_NUMBERS: usize = 16_384;

/// x / sqrt(mean(x^2) + eps) * weight, for each group of `group` numbers of a row.
///
/// A row of one group is the usual norm; a row of several is the norm of each head. The weight
/// spans one group or several and is repeated along the row. Computed in `f32`, rounded once.
///
/// # Panics
/// The shapes do not fit.
pub fn rms_norm<E: Element>(
    form: Form,
    team: &Team,
    x: Rows<'_, E>,
    weight: &[E],
    group: usize,
    eps: f32,
    out: &RowsMut<'_, E>,
) {
    assert_eq!(x.shape(), out.shape(), "shape of out");
    assert!(
        x.width().is_multiple_of(weight.len()),
        "width of the weight"
    );
    assert!(weight.len().is_multiple_of(group), "width of a group");
    each_row(form, team, x, out, &RmsNorm { weight, group, eps });
}

/// The function between the two halves of a gated layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// x / (1 + e^-x)
    Silu,
    /// x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3): gelu in its tanh form.
    GeluTanh,
}

/// gate(first half of the row) * second half.
///
/// # Panics
/// A row of x is not twice as wide as one of `out`.
pub fn gated<E: Element>(
    form: Form,
    team: &Team,
    gate: Gate,
    x: Rows<'_, E>,
    out: &RowsMut<'_, E>,
) {
    assert_eq!(x.shape(), (out.rows(), 2 * out.width()), "shape of x");
    each_row(form, team, x, out, &Gated { gate });
}

/// Turns each head of a row by the row's angles: halves (x, y) become
/// (x cos - y sin, y cos + x sin).
///
/// A row of `cos` and one of `sin` belong to each row of x, and are half as wide as a head.
///
/// # Panics
/// The shapes do not fit.
pub fn rotate<E: Element>(
    form: Form,
    team: &Team,
    cos: Rows<'_, f32>,
    sin: Rows<'_, f32>,
    x: Rows<'_, E>,
    out: &RowsMut<'_, E>,
) {
    assert_eq!(cos.shape(), sin.shape(), "shape of sin");
    assert_eq!(x.shape(), out.shape(), "shape of out");
    assert_eq!(cos.rows(), x.rows(), "rows of cos");
    assert!(x.width().is_multiple_of(2 * cos.width()), "width of cos");
    each_row(form, team, x, out, &Rotate { cos, sin });
}

/// What a layer makes of one row.
trait RowWork<E>: Sync {
    /// Writes `out` from `x`, row `row` of both.
    fn run<L: Lanes>(&self, lanes: L, row: usize, x: &[E], out: &mut [E]);
}

fn each_row<E: Element>(
    form: Form,
    team: &Team,
    x: Rows<'_, E>,
    out: &RowsMut<'_, E>,
    work: &impl RowWork<E>,
) {
    if x.width() == 0 {
        return;
    }
    let chunk = (TASK_NUMBERS / x.width()).max(1);
    team.run(x.rows().div_ceil(chunk), |task| {
        let rows = task * chunk..((task + 1) * chunk).min(x.rows());
        form.run(Chunk { work, x, out, rows });
    });
}

/// The rows of one task.
struct Chunk<'a, E, W> {
    work: &'a W,
    x: Rows<'a, E>,
    out: &'a RowsMut<'a, E>,
    rows: Range<usize>,
}

impl<E: Element, W: RowWork<E>> Kernel for Chunk<'_, E, W> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for row in self.rows {
            // SAFETY: a row belongs to one task.
            let out = unsafe { self.out.part(row, 0, self.out.width()) };
            self.work.run(lanes, row, self.x.row(row), out);
        }
    }
}

/// Starts of the vectors of `width` numbers, and how many numbers each really has.
#[inline(always)]
fn vectors<L: Lanes>(width: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..width)
        .step_by(L::LANES)
        .map(move |at| (at, (width - at).min(L::LANES)))
}

struct RmsNorm<'a, E> {
    weight: &'a [E],
    group: usize,
    eps: f32,
}

impl<E: Element> RowWork<E> for RmsNorm<'_, E> {
    #[inline(always)]
    fn run<L: Lanes>(&self, lanes: L, _row: usize, x: &[E], out: &mut [E]) {
        let groups = x
            .chunks_exact(self.group)
            .zip(out.chunks_exact_mut(self.group));
        for ((x, out), weight) in groups.zip(self.weight.chunks_exact(self.group).cycle()) {
            norm_group(lanes, x, weight, self.eps, out);
        }
    }
}

#[inline(always)]
fn norm_group<E: Element, L: Lanes>(lanes: L, x: &[E], weight: &[E], eps: f32, out: &mut [E]) {
    let mut squares = lanes.splat(0.0);
    for (at, count) in vectors::<L>(x.len()) {
        // SAFETY: `count` numbers stand at `at`.
        let v = unsafe { E::load_some(lanes, x[at..].as_ptr(), count) };
        squares = lanes.mul_add(v, v, squares);
    }
    let scale = lanes.splat(1.0 / (lanes.sum(squares) / x.len() as f32 + eps).sqrt());
    for (at, count) in vectors::<L>(x.len()) {
        // SAFETY: `count` numbers stand at `at` in each of the three, which are equally long.
        unsafe {
            let v = E::load_some(lanes, x[at..].as_ptr(), count);
            let w = E::load_some(lanes, weight[at..].as_ptr(), count);
            let y = lanes.mul(lanes.mul(v, scale), w);
            E::store_some(lanes, out[at..].as_mut_ptr(), y, count);
        }
    }
}

struct Gated {
    gate: Gate,
}

impl<E: Element> RowWork<E> for Gated {
    #[inline(always)]
    fn run<L: Lanes>(&self, lanes: L, _row: usize, x: &[E], out: &mut [E]) {
        let (gates, values) = x.split_at(out.len());
        for (at, count) in vectors::<L>(values.len()) {
            // SAFETY: `count` numbers stand at `at` in each of the three.
            unsafe {
                let x = E::load_some(lanes, gates[at..].as_ptr(), count);
                let v = E::load_some(lanes, values[at..].as_ptr(), count);
                let y = lanes.mul(opened(lanes, self.gate, x), v);
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
        Gate::Silu => lanes.sub(lanes.splat(0.0), x),
        Gate::GeluTanh => {
            let square = lanes.mul(x, x);
            let cubic = lanes.mul_add(square, lanes.splat(-0.044715 * SLOPE), lanes.splat(-SLOPE));
            lanes.mul(cubic, x)
        }
    };
    lanes.div(x, lanes.add(lanes.splat(1.0), lanes.exp(minus_t)))
}

struct Rotate<'a> {
    cos: Rows<'a, f32>,
    sin: Rows<'a, f32>,
}

impl<E: Element> RowWork<E> for Rotate<'_> {
    #[inline(always)]
    fn run<L: Lanes>(&self, lanes: L, row: usize, x: &[E], out: &mut [E]) {
        let (cos, sin) = (self.cos.row(row), self.sin.row(row));
        let heads = x
            .chunks_exact(2 * cos.len())
            .zip(out.chunks_exact_mut(2 * cos.len()));
        for (head, out) in heads {
            rotate_head(lanes, head, cos, sin, out);
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
