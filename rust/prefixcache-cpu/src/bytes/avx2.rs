//! Eight lanes with AVX2, with and without its instruction for dot products of bytes.

use std::arch::x86_64::*;

use super::ByteLanes;
use crate::lanes;

/// Proof that the processor has AVX2, FMA and F16C, and AVX-VNNI where `VNNI` says so.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Avx2<const VNNI: bool>(());

impl Avx2<false> {
    /// The proof, where the processor has the instructions.
    pub fn detect() -> Option<Self> {
        lanes::avx2::Avx2::detect().map(|_| Self(()))
    }
}

impl Avx2<true> {
    /// The proof, where the processor has the instructions.
    pub fn detect_vnni() -> Option<Self> {
        let found = lanes::avx2::Avx2::detect().filter(|_| is_x86_feature_detected!("avxvnni"));
        found.map(|_| Self(()))
    }
}

impl<const VNNI: bool> ByteLanes for Avx2<VNNI> {
    type I = __m256i;
    type F = __m256;
    const LANES: usize = 8;
    const DOT_OF_FOUR: bool = VNNI;

    operations! {
        unsafe fn load(self, from: *const u8) -> __m256i { _mm256_loadu_si256(from.cast()) }
        unsafe fn load_u8(self, from: *const u8) -> __m256i {
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()))
        }
        unsafe fn load_i8(self, from: *const u8) -> __m256i {
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))
        }
        unsafe fn load_f16(self, from: *const u8) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
        unsafe fn load_e8m0(self, from: *const u8) -> __m256 {
            let exponents = _mm256_slli_epi32::<23>(self.load_u8(from));
            let twice = _mm256_max_epi32(exponents, _mm256_set1_epi32(0x0040_0000));
            _mm256_mul_ps(_mm256_castsi256_ps(twice), _mm256_set1_ps(0.5))
        }
        unsafe fn load_f32(self, from: *const f32) -> __m256 { _mm256_loadu_ps(from) }
        unsafe fn store(self, to: *mut f32, v: __m256) { _mm256_storeu_ps(to, v) }
    }

    operations! {
        fn lookup(self, table: &[u8; 16], bytes: __m256i) -> __m256i {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), bytes)
        }
        fn shift_up<const N: u32>(self, a: __m256i) -> __m256i {
            _mm256_sll_epi32(a, _mm_cvtsi32_si128(N as i32))
        }
        fn shift_down<const N: u32>(self, a: __m256i) -> __m256i {
            _mm256_srl_epi32(a, _mm_cvtsi32_si128(N as i32))
        }
        fn dot(self, acc: __m256i, bytes: __m256i, x: __m256i) -> __m256i {
            if !VNNI {
                unreachable!("the form has pairs");
            }
            _mm256_dpbusd_avx_epi32(acc, bytes, x)
        }
    }

    operations! {
        fn splat(self, x: i32) -> __m256i { _mm256_set1_epi32(x) }
        fn splat_f32(self, x: f32) -> __m256 { _mm256_set1_ps(x) }
        fn add(self, a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi32(a, b) }
        fn sub(self, a: __m256i, b: __m256i) -> __m256i { _mm256_sub_epi32(a, b) }
        fn mul(self, a: __m256i, b: __m256i) -> __m256i { _mm256_mullo_epi32(a, b) }
        fn and(self, a: __m256i, b: __m256i) -> __m256i { _mm256_and_si256(a, b) }
        fn or(self, a: __m256i, b: __m256i) -> __m256i { _mm256_or_si256(a, b) }
        fn pairs(self, codes: __m256i, x: __m256i) -> __m256i { _mm256_maddubs_epi16(codes, x) }
        fn less_128(self, bytes: __m256i) -> __m256i { _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)) }
        fn magnitudes(self, bytes: __m256i) -> __m256i { _mm256_abs_epi8(bytes) }
        fn with_signs(self, x: __m256i, signs: __m256i) -> __m256i { _mm256_sign_epi8(x, signs) }
        fn add_pairs(self, a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi16(a, b) }
        fn pair(self, low: __m256i, high: __m256i) -> __m256i {
            _mm256_blend_epi16::<0b1010_1010>(low, _mm256_slli_epi32::<16>(high))
        }
        fn dot_pairs(self, a: __m256i, b: __m256i) -> __m256i { _mm256_madd_epi16(a, b) }
        fn to_f32(self, a: __m256i) -> __m256 { _mm256_cvtepi32_ps(a) }
        fn mul_f32(self, a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
    }
}
