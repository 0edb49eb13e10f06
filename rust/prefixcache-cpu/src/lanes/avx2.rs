//! Eight lanes with AVX2 and FMA.

use std::arch::x86_64::*;

use super::{CodeTable, Lanes};
use crate::bf16::Bf16;

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Avx2(());

impl Avx2 {
    /// The proof, where the processor has the instructions.
    pub fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }
}

/// Bits whose upper halves are the numbers rounded to bfloat16 (nearest, ties to even); none is NaN.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn rounded_up(v: __m256) -> __m256i {
    // SAFETY: the caller vouches for AVX2.
    unsafe {
        let bits = _mm256_castps_si256(v);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        _mm256_add_epi32(bits, bias)
    }
}

/// No instruction, but it takes and gives a register.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn in_register(mut v: __m256) -> __m256 {
    // SAFETY: the text is a comment.
    unsafe {
        std::arch::asm!(
            "/* {} */",
            inout(ymm_reg) v,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    v
}

/// See [`Lanes::add_fields`]. A compiler keeps scales in registers that sums, words and offsets need, and spills
/// those: as it is written here, scales and `x` alone are loaded, and a row takes a fifth less time. It is not `pure`,
/// so that shifts of words stay between the steps that they belong to.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_fields(
    [mut a, mut b, mut c, mut d]: [__m256; 4],
    words: [__m256; 4],
    mask: __m256i,
    scales: &[__m256; 4],
    offsets: [__m256; 4],
    x: &f32,
) -> [__m256; 4] {
    // SAFETY: it reads `x` and the four vectors of `scales`, writes no memory, and the registers that it
    // changes are named.
    unsafe {
        std::arch::asm!(
            "vbroadcastss {x}, [{from}]",
            "vpand {t}, {mask}, {words0}",
            "vcvtdq2ps {t}, {t}",
            "vfmadd132ps {t}, {offset0}, [{scales}]",
            "vfmadd231ps {a}, {t}, {x}",
            "vpand {t}, {mask}, {words1}",
            "vcvtdq2ps {t}, {t}",
            "vfmadd132ps {t}, {offset1}, [{scales} + 32]",
            "vfmadd231ps {b}, {t}, {x}",
            "vpand {t}, {mask}, {words2}",
            "vcvtdq2ps {t}, {t}",
            "vfmadd132ps {t}, {offset2}, [{scales} + 64]",
            "vfmadd231ps {c}, {t}, {x}",
            "vpand {t}, {mask}, {words3}",
            "vcvtdq2ps {t}, {t}",
            "vfmadd132ps {t}, {offset3}, [{scales} + 96]",
            "vfmadd231ps {d}, {t}, {x}",
            x = out(ymm_reg) _,
            t = out(ymm_reg) _,
            from = in(reg) x,
            scales = in(reg) scales,
            mask = in(ymm_reg) mask,
            words0 = in(ymm_reg) words[0],
            words1 = in(ymm_reg) words[1],
            words2 = in(ymm_reg) words[2],
            words3 = in(ymm_reg) words[3],
            offset0 = in(ymm_reg) offsets[0],
            offset1 = in(ymm_reg) offsets[1],
            offset2 = in(ymm_reg) offsets[2],
            offset3 = in(ymm_reg) offsets[3],
            a = inout(ymm_reg) a,
            b = inout(ymm_reg) b,
            c = inout(ymm_reg) c,
            d = inout(ymm_reg) d,
            options(readonly, nostack, preserves_flags)
        );
    }
    [a, b, c, d]
}

impl Lanes for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const WIDTH: usize = 2;
    const LANE_IS_COLUMN: bool = true;

    operations! {
        fn splat(self, x: f32) -> __m256 { _mm256_set1_ps(x) }
        fn in_register(self, v: __m256) -> __m256 { in_register(v) }
        fn field<const BITS: u32, const SIGNED: bool>(self, words: __m256, at: u32) -> __m256 {
            let left = _mm256_set1_epi32((32 - at - BITS) as i32);
            let top = _mm256_sllv_epi32(_mm256_castps_si256(words), left);
            let right = _mm256_set1_epi32(32 - BITS as i32);
            _mm256_cvtepi32_ps(match SIGNED {
                true => _mm256_srav_epi32(top, right),
                false => _mm256_srlv_epi32(top, right),
            })
        }
        fn add_fields<const BITS: u32>(
            self, sums: [__m256; 4], words: [__m256; 4], at: u32, scales: &[__m256; 4], offsets: [__m256; 4], x: &f32
        ) -> [__m256; 4] {
            let mask = _mm256_set1_epi32((((1_u32 << BITS) - 1) << at).cast_signed());
            add_fields(sums, words, mask, scales, offsets, x)
        }
        fn lookup(self, table: &CodeTable, words: __m256, at: u32) -> __m256 {
            // Four codes of a word at once: those that follow are in the same register.
            let moved = _mm256_set1_epi32((at % 8) as i32);
            let words = _mm256_srlv_epi32(_mm256_castps_si256(words), moved);
            let nibbles = _mm256_and_si256(words, _mm256_set1_epi8(15));
            let codes = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.above.as_ptr().cast()));
            let codes = _mm256_shuffle_epi8(codes, nibbles);
            let moved = _mm256_srlv_epi32(codes, _mm256_set1_epi32((at / 8 * 8) as i32));
            _mm256_cvtepi32_ps(_mm256_and_si256(moved, _mm256_set1_epi32(0xff)))
        }
        fn join(self, low: __m256, high: __m256, at: u32) -> __m256 {
            let (low, high) = (_mm256_castps_si256(low), _mm256_castps_si256(high));
            let low = _mm256_srlv_epi32(low, _mm256_set1_epi32(at as i32));
            let high = _mm256_sllv_epi32(high, _mm256_set1_epi32(32 - at as i32));
            _mm256_castsi256_ps(_mm256_or_si256(low, high))
        }
        fn zip_rounded(self, even: __m256, odd: __m256) -> __m256 {
            let low = _mm256_srli_epi32::<16>(rounded_up(even));
            _mm256_castsi256_ps(_mm256_blend_epi16::<0b1010_1010>(low, rounded_up(odd)))
        }
    }

    operations! {
        unsafe fn load(self, from: *const f32) -> __m256 { _mm256_loadu_ps(from) }
        unsafe fn store(self, to: *mut f32, v: __m256) { _mm256_storeu_ps(to, v) }
        unsafe fn load_bf16(self, from: *const Bf16) -> __m256 {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
        unsafe fn store_bf16(self, to: *mut Bf16, v: __m256) {
            let upper = _mm256_srli_epi32::<16>(_mm256_castps_si256(v));
            let rounded = _mm256_srli_epi32::<16>(rounded_up(v));
            let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let words = _mm256_blendv_epi8(rounded, quiet, nan);
            let packed = _mm256_packus_epi32(words, words);
            let packed = _mm256_permute4x64_epi64::<0b1000>(packed);
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(packed));
        }
        unsafe fn load_f16(self, from: *const u16) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
        unsafe fn load_u8(self, from: *const u8) -> __m256 {
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast())))
        }
        unsafe fn load_i8(self, from: *const i8) -> __m256 {
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast())))
        }
    }

    arithmetic! {
        __m256;
        fn iota() _mm256_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0);
        fn add(a, b) _mm256_add_ps(a, b);
        fn sub(a, b) _mm256_sub_ps(a, b);
        fn mul(a, b) _mm256_mul_ps(a, b);
        fn div(a, b) _mm256_div_ps(a, b);
        fn max(a, b) _mm256_max_ps(a, b);
        fn min(a, b) _mm256_min_ps(a, b);
        fn mul_add(a, b, c) _mm256_fmadd_ps(a, b, c);
        fn dot_pair(acc, a, b) {
            let upper = _mm256_castsi256_ps(_mm256_set1_epi32(0xffff_0000_u32 as i32));
            let low = |v| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(v)));
            let acc = _mm256_fmadd_ps(low(a), low(b), acc);
            _mm256_fmadd_ps(_mm256_and_ps(a, upper), _mm256_and_ps(b, upper), acc)
        };
        fn select_less(a, b, yes, no)
            _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b));
        fn zip_upper(even, odd) {
            let low = _mm256_srli_epi32::<16>(_mm256_castps_si256(even));
            _mm256_or_ps(_mm256_castsi256_ps(low), odd)
        };
        fn highest(v) {
            let v = _mm256_max_ps(v, _mm256_permute2f128_ps::<1>(v, v));
            let v = _mm256_max_ps(v, _mm256_permute_ps::<0b0100_1110>(v));
            _mm256_max_ps(v, _mm256_permute_ps::<0b1011_0001>(v))
        };
        fn pow2(n) {
            let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(n));
            _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(127 << 23)))
        };
    }
}
