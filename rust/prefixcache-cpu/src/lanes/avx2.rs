//! Eight lanes with AVX2 and FMA.

use std::arch::x86_64::*;

use super::Lanes;
use crate::bf16::Bf16;

/// Proof that the processor has AVX2 and FMA.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Avx2(());

impl Avx2 {
    /// The proof, where the processor has the instructions.
    pub fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
    }
}

impl Lanes for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const WIDTH: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: `self` proves that the processor has AVX.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        // SAFETY: the caller vouches for 8 readable numbers.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: __m256) {
        // SAFETY: the caller vouches for 8 writable numbers.
        unsafe { _mm256_storeu_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const Bf16) -> __m256 {
        // SAFETY: the caller vouches for 8 readable numbers.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut Bf16, v: __m256) {
        // SAFETY: the caller vouches for 8 writable numbers; `self` proves AVX2.
        unsafe {
            let bits = _mm256_castps_si256(v);
            let upper = _mm256_srli_epi32::<16>(bits);
            let odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
            let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
            let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let words = _mm256_blendv_epi8(rounded, quiet, nan);
            let packed = _mm256_packus_epi32(words, words);
            let packed = _mm256_permute4x64_epi64::<0b1000>(packed);
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(packed));
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
