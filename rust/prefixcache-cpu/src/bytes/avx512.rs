//! Sixteen lanes with AVX-512 and its instruction for dot products of bytes.

use std::arch::x86_64::*;

use super::ByteLanes;

/// Proof that the processor has AVX-512 (F, BW, DQ, VL, VNNI).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Avx512Vnni(());

impl Avx512Vnni {
    /// The proof, where the processor has the instructions.
    pub fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        found.then_some(Self(()))
    }
}

impl ByteLanes for Avx512Vnni {
    type I = __m512i;
    type F = __m512;
    const LANES: usize = 16;
    const WIDTH: usize = 4;
    const DOT_OF_FOUR: bool = true;

    #[inline(always)]
    unsafe fn load(self, from: *const u8) -> __m512i {
        // SAFETY: the caller vouches for 64 readable bytes.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> __m512i {
        // SAFETY: the caller vouches for 16 readable bytes.
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const u8) -> __m512i {
        // SAFETY: the caller vouches for 16 readable bytes.
        unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u8) -> __m512 {
        // SAFETY: the caller vouches for 32 readable bytes.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_e8m0(self, from: *const u8) -> __m512 {
        // SAFETY: the caller vouches for 16 readable bytes.
        unsafe {
            let exponents = _mm512_slli_epi32::<23>(self.load_u8(from));
            let twice = _mm512_max_epi32(exponents, _mm512_set1_epi32(0x0040_0000));
            _mm512_mul_ps(_mm512_castsi512_ps(twice), _mm512_set1_ps(0.5))
        }
    }

    #[inline(always)]
    unsafe fn load_f32(self, from: *const f32) -> __m512 {
        // SAFETY: the caller vouches for 16 readable numbers.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: __m512) {
        // SAFETY: the caller vouches for 16 writable numbers.
        unsafe { _mm512_storeu_ps(to, v) }
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; 16], bytes: __m512i) -> __m512i {
        // SAFETY: `self` proves that the processor has the instructions; the table has 16 bytes.
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), bytes)
        }
    }

    #[inline(always)]
    fn shift_up<const N: u32>(self, a: __m512i) -> __m512i {
        // SAFETY: `self` proves that the processor has AVX-512.
        unsafe { _mm512_slli_epi32::<N>(a) }
    }

    #[inline(always)]
    fn shift_down<const N: u32>(self, a: __m512i) -> __m512i {
        // SAFETY: `self` proves that the processor has AVX-512.
        unsafe { _mm512_srli_epi32::<N>(a) }
    }

    operations! {
        fn splat(x: i32) -> __m512i { _mm512_set1_epi32(x) }
        fn splat_f32(x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn add(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        fn sub(a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi32(a, b) }
        fn mul(a: __m512i, b: __m512i) -> __m512i { _mm512_mullo_epi32(a, b) }
        fn and(a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
        fn or(a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        fn dot_codes(acc: __m512i, codes: __m512i, x: __m512i) -> __m512i {
            _mm512_dpbusd_epi32(acc, codes, x)
        }
        fn dot_bytes(acc: __m512i, bytes: __m512i, x: __m512i) -> __m512i {
            _mm512_dpbusd_epi32(acc, bytes, x)
        }
        fn to_f32(a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }
        fn mul_f32(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
    }
}
