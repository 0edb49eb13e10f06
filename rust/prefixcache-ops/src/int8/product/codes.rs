//! Codes as they come out of a unit, and their products with numbers of x.

use prefixcache_cpu::ByteLanes;

use super::panel::Packed;

/// Whether codes are multiplied as signed numbers: those of eight bits, of which two products less 128 fit into 16
/// bits.
pub(super) const fn has_signs<P: Packed, L: ByteLanes>() -> bool {
    P::LAYOUT.dot_bits == 8 && !L::DOT_OF_FOUR
}

/// How many pairs of products of codes of `bits` bits 16 bits hold: 2 * 15 * 127 each, and so on.
pub(super) const fn most_pairs(bits: usize) -> usize {
    match bits {
        4 => 8,
        5 => 4,
        6 => 2,
        _ => 1,
    }
}

/// The codes of steps `4 g..` and `16 + 4 g..`; `high` is what is left of the upper bits.
///
/// # Safety
/// The codes of 32 steps begin at `codes`.
#[inline(always)]
pub(super) unsafe fn four_steps<P: Packed, L: ByteLanes>(
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

/// The products of codes and x in pairs.
#[inline(always)]
pub(super) fn products<P: Packed, L: ByteLanes>(
    lanes: L,
    codes: L::I,
    magnitudes: L::I,
    x: L::I,
) -> L::I {
    match const { has_signs::<P, L>() } {
        true => lanes.pairs(magnitudes, lanes.with_signs(x, codes)),
        false => lanes.pairs(codes, x),
    }
}

/// The same of codes whose magnitudes nobody has kept.
#[inline(always)]
pub(super) fn products_of<P: Packed, L: ByteLanes>(lanes: L, codes: L::I, x: L::I) -> L::I {
    let magnitudes = match const { has_signs::<P, L>() } {
        true => lanes.magnitudes(codes),
        false => codes,
    };
    products::<P, L>(lanes, codes, magnitudes, x)
}
