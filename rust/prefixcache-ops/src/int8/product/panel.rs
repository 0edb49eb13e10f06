//! A panel as kernels see it.

use std::marker::PhantomData;

use prefixcache_cpu::ByteLanes;
use prefixcache_cpu::memory::prefetch;

use crate::int8::tiles::{Int8Weight, Layout, TILE};
use crate::quant::formats::OfFormat;

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// The same where units are read in the order of memory: half of what a processor's own prefetcher follows as
/// one stream, a page of 4 KiB.
const NEXT: usize = 2048;

/// The most vectors that the outputs of a unit are.
pub(super) const VECTORS: usize = TILE / 8;

/// How the units of a format that the compiler knows are laid out.
pub(super) trait Packed: OfFormat {
    const LAYOUT: Layout = Layout::of(Self::FORMAT);
}

impl<F: OfFormat> Packed for F {}

/// A panel whose format and vectors the compiler knows.
pub(super) struct Panel<P, L> {
    pub(super) lanes: L,
    pub(super) units: *const u8,
    /// Units side by side.
    pub(super) width: usize,
    /// Units along the depth.
    pub(super) depth: usize,
    format: PhantomData<P>,
}

impl<P: Packed, L: ByteLanes> Panel<P, L> {
    #[inline(always)]
    pub(super) fn new(lanes: L, weight: &Int8Weight, panel: usize) -> Self {
        Self {
            lanes,
            units: weight.panel(panel).as_ptr(),
            width: weight.width(panel),
            depth: weight.depth(),
            format: PhantomData,
        }
    }

    /// Asks for what lies ahead of a block.
    #[inline(always)]
    pub(super) fn fetch_block(&self, unit: *const u8, b: usize) {
        let share = const { P::LAYOUT.unit() / P::LAYOUT.blocks };
        for line in 0..share.div_ceil(LINE) {
            let ahead = NEXT + b * share + line * LINE;
            prefetch(unit.wrapping_add(ahead));
        }
    }
}
