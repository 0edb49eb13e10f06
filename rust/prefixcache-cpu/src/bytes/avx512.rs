//! Sixteen lanes with AVX-512 and its instruction for dot products of bytes.

use std::arch::x86_64::*;

use super::ByteLanes;
use crate::lanes::avx512::Avx512;

/// Proof that the processor has AVX-512 (F, BW, DQ, VL, VNNI).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Avx512Vnni(());

impl Avx512Vnni {
    /// The proof, where the processor has the instructions.
    pub fn detect() -> Option<Self> {
        let found = Avx512::detect().filter(|_| is_x86_feature_detected!("avx512vnni"));
        found.map(|_| Self(()))
    }
}

impl ByteLanes for Avx512Vnni {
    type I = __m512i;
    type F = __m512;
    const LANES: usize = 16;
    const DOT_OF_FOUR: bool = true;

    operations! {
        unsafe fn load(self, from: *const u8) -> __m512i { _mm512_loadu_si512(from.cast()) }
        unsafe fn load_u8(self, from: *const u8) -> __m512i {
            _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))
        }
        unsafe fn load_i8(self, from: *const u8) -> __m512i {
            _mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))
        }
        unsafe fn load_f16(self, from: *const u8) -> __m512 {
            _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
        }
        unsafe fn load_e8m0(self, from: *const u8) -> __m512 {
            let exponents = _mm512_slli_epi32::<23>(self.load_u8(from));
            let twice = _mm512_max_epi32(exponents, _mm512_set1_epi32(0x0040_0000));
            _mm512_mul_ps(_mm512_castsi512_ps(twice), _mm512_set1_ps(0.5))
        }
        unsafe fn load_f32(self, from: *const f32) -> __m512 { _mm512_loadu_ps(from) }
        unsafe fn store(self, to: *mut f32, v: __m512) { _mm512_storeu_ps(to, v) }
    }

    operations! {
        fn lookup(self, table: &[u8; 16], bytes: __m512i) -> __m512i {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), bytes)
        }
        fn shift_up<const N: u32>(self, a: __m512i) -> __m512i { _mm512_slli_epi32::<N>(a) }
        fn shift_down<const N: u32>(self, a: __m512i) -> __m512i { _mm512_srli_epi32::<N>(a) }
    }

    operations! {
        fn splat(self, x: i32) -> __m512i { _mm512_set1_epi32(x) }
        fn splat_f32(self, x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn add(self, a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        fn sub(self, a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi32(a, b) }
        fn mul(self, a: __m512i, b: __m512i) -> __m512i { _mm512_mullo_epi32(a, b) }
        fn and(self, a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
        fn or(self, a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        fn dot(self, acc: __m512i, bytes: __m512i, x: __m512i) -> __m512i {
            _mm512_dpbusd_epi32(acc, bytes, x)
        }
        fn pair(self, low: __m512i, high: __m512i) -> __m512i {
            _mm512_mask_blend_epi16(0xaaaa_aaaa, low, _mm512_slli_epi32::<16>(high))
        }
        fn dot_pairs(self, a: __m512i, b: __m512i) -> __m512i { _mm512_madd_epi16(a, b) }
        fn to_f32(self, a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }
        fn mul_f32(self, a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
    }
}
