//! What sums of products are multiplied with before they are added to an output.

use std::marker::PhantomData;

use prefixcache_cpu::ByteLanes;

use super::codes::has_signs;
use super::panel::{Packed, VECTORS};
use crate::int8::activations::ActivationBlock;
use crate::int8::tiles::TILE;
use crate::quant::blocks::Scales;

/// What a block of x multiplies the sums of each output with.
pub(super) struct Factors<L: ByteLanes> {
    scale: L::F,
    sum: L::F,
    /// [`ActivationBlock::minus_halves`].
    minus: L::I,
}

impl<L: ByteLanes> Factors<L> {
    #[inline(always)]
    pub(super) fn new(lanes: L, x: &ActivationBlock) -> Self {
        Self {
            scale: lanes.splat_f32(x.scale),
            sum: lanes.splat_f32(x.sum),
            minus: lanes.splat(x.minus_pair()),
        }
    }
}

/// What sums of codes times numbers of x are multiplied with, in a vector of outputs.
pub(super) struct Scaling<P, L: ByteLanes> {
    scale: L::F,
    minimum: L::F,
    /// Of the sums of both halves, where they have some.
    pub(super) factors: [L::I; 2],
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
    pub(super) unsafe fn new(
        lanes: L,
        unit: *const u8,
        at: usize,
        lane: usize,
        header: (L::F, L::F),
    ) -> Self {
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
    pub(super) fn sum(&self, lanes: L, pairs: L::I, half: usize) -> L::I {
        let factor = self.factors[half];
        match const { P::LAYOUT.halves() } {
            true => lanes.dot_pairs(pairs, lanes.pair(factor, factor)),
            false => lanes.dot_pairs(pairs, lanes.splat(0x0001_0001)),
        }
    }

    /// Sums of a block's codes as they are stored, less those of their offset.
    #[inline(always)]
    pub(super) fn less_offset(&self, lanes: L, sum: L::I, x: &Factors<L>) -> L::I {
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
    pub(super) fn add(&self, lanes: L, sum: L::F, x: &Factors<L>, acc: L::F) -> L::F {
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
pub(super) unsafe fn headers<P: Packed, L: ByteLanes>(
    lanes: L,
    unit: *const u8,
) -> [(L::F, L::F); VECTORS] {
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
pub(super) unsafe fn header_of<P: Packed, L: ByteLanes>(
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
pub(super) unsafe fn half_factors<P: Packed, L: ByteLanes>(
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
