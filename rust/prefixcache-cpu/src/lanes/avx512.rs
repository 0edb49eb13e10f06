//! Sixteen lanes with AVX-512, with and without the bfloat16 dot product.

use std::arch::x86_64::*;

use super::{CodeTable, Lanes};
use crate::bf16::Bf16;

/// Proof that the processor has AVX-512 (F, BW, DQ, VL).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Avx512(());

/// Proof that the processor has AVX-512 and its bfloat16 instructions.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Avx512Bf16(());

impl Avx512 {
    /// The proof, where the processor has the instructions.
    pub fn detect() -> Option<Self> {
        let found = super::avx2::Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        found.then_some(Self(()))
    }
}

impl Avx512Bf16 {
    /// The proof, where the processor has the instructions.
    pub fn detect() -> Option<Self> {
        let found = Avx512::detect().is_some() && is_x86_feature_detected!("avx512bf16");
        found.then_some(Self(()))
    }

    /// Whether its dot product takes less time than two fused multiplications. Intel's processors do one in two cycles,
    /// in which they do four of those.
    pub fn is_fast() -> bool {
        // Bytes 4 to 15 of leaf 0 are the name; the middle four come last.
        #[allow(unused_unsafe, reason = "it is safe since Rust 1.94")]
        // SAFETY: every x86-64 processor has the instruction.
        let leaf = unsafe { __cpuid(0) };
        [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() != b"GenuineIntel"
    }

    /// The proof of less.
    pub fn without_bf16(self) -> Avx512 {
        Avx512(())
    }
}

/// What both forms share.
macro_rules! common {
    () => {
        type V = __m512;
        const LANES: usize = 16;
        const WIDTH: usize = 4;

        operations! {
            fn splat(self, x: f32) -> __m512 { _mm512_set1_ps(x) }
            fn field<const BITS: u32, const SIGNED: bool>(self, words: __m512, at: u32) -> __m512 {
                field::<BITS, SIGNED>(_mm512_castps_si512(words), at)
            }
            fn lookup(self, table: &CodeTable, words: __m512, at: u32) -> __m512 {
                let at = _mm512_set1_epi32(at as i32);
                let codes = _mm512_srlv_epi32(_mm512_castps_si512(words), at);
                let numbers = match Self::LANE_IS_COLUMN {
                    true => &table.numbers_above,
                    false => &table.numbers,
                };
                _mm512_permutexvar_ps(codes, _mm512_load_ps(numbers.as_ptr()))
            }
            fn join(self, low: __m512, high: __m512, at: u32) -> __m512 {
                let (low, high) = (_mm512_castps_si512(low), _mm512_castps_si512(high));
                let low = _mm512_srlv_epi32(low, _mm512_set1_epi32(at as i32));
                let high = _mm512_sllv_epi32(high, _mm512_set1_epi32(32 - at as i32));
                _mm512_castsi512_ps(_mm512_or_si512(low, high))
            }
        }

        operations! {
            unsafe fn load(self, from: *const f32) -> __m512 { _mm512_loadu_ps(from) }
            unsafe fn store(self, to: *mut f32, v: __m512) { _mm512_storeu_ps(to, v) }
            unsafe fn load_bf16(self, from: *const Bf16) -> __m512 {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }
            unsafe fn load_f16(self, from: *const u16) -> __m512 {
                _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
            }
            unsafe fn load_u8(self, from: *const u8) -> __m512 {
                _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())))
            }
            unsafe fn load_i8(self, from: *const i8) -> __m512 {
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))
            }
        }

        #[inline(always)]
        unsafe fn transpose(
            self,
            from: &[*const u32; 16],
            words: usize,
            to: *mut u32,
            stride: usize,
        ) {
            for start in (0..words).step_by(16) {
                let count = (words - start).min(16);
                // SAFETY: as the caller vouches; masks keep to `count` words of a row.
                unsafe { transpose_16(from, start, count, to.add(start * stride), stride) }
            }
        }

        arithmetic! {
            __m512;
            fn iota() _mm512_setr_ps(
                0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0
            );
            fn add(a, b) _mm512_add_ps(a, b);
            fn sub(a, b) _mm512_sub_ps(a, b);
            fn mul(a, b) _mm512_mul_ps(a, b);
            fn div(a, b) _mm512_div_ps(a, b);
            fn max(a, b) _mm512_max_ps(a, b);
            fn min(a, b) _mm512_min_ps(a, b);
            fn mul_add(a, b, c) _mm512_fmadd_ps(a, b, c);
            fn select_less(a, b, yes, no)
                _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes);
            fn zip_upper(even, odd) {
                let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(even));
                _mm512_or_ps(_mm512_castsi512_ps(low), odd)
            };
            fn highest(v) {
                let v = _mm512_max_ps(v, _mm512_shuffle_f32x4::<0b0100_1110>(v, v));
                let v = _mm512_max_ps(v, _mm512_shuffle_f32x4::<0b1011_0001>(v, v));
                let v = _mm512_max_ps(v, _mm512_permute_ps::<0b0100_1110>(v));
                _mm512_max_ps(v, _mm512_permute_ps::<0b1011_0001>(v))
            };
            fn pow2(n) {
                let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(n));
                _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(127 << 23)))
            };
        }
    };
}

impl Lanes for Avx512 {
    common!();
    const LANE_IS_COLUMN: bool = true;

    operations! {
        fn add_fields<const BITS: u32>(
            self, sums: [__m512; 4], words: [__m512; 4], at: u32, scales: &[__m512; 4], offsets: [__m512; 4], x: &f32
        ) -> [__m512; 4] {
            let mask = _mm512_set1_epi32((((1_u32 << BITS) - 1) << at).cast_signed());
            let (mut sums, x) = (sums, _mm512_set1_ps(*x));
            for i in 0..4 {
                let fields = _mm512_and_si512(_mm512_castps_si512(words[i]), mask);
                let numbers = _mm512_fmadd_ps(_mm512_cvtepi32_ps(fields), scales[i], offsets[i]);
                sums[i] = _mm512_fmadd_ps(numbers, x, sums[i]);
            }
            sums
        }
        fn zip_rounded(self, even: __m512, odd: __m512) -> __m512 {
            let low = _mm512_srli_epi32::<16>(rounded_up(even));
            _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaa_aaaa, low, rounded_up(odd)))
        }
    }

    arithmetic! {
        __m512;
        fn dot_pair(acc, a, b) {
            let upper = _mm512_castsi512_ps(_mm512_set1_epi32(0xffff_0000_u32 as i32));
            let low = |v| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(v)));
            let acc = _mm512_fmadd_ps(low(a), low(b), acc);
            _mm512_fmadd_ps(_mm512_and_ps(a, upper), _mm512_and_ps(b, upper), acc)
        };
    }

    operations! {
        unsafe fn store_bf16(self, to: *mut Bf16, v: __m512) {
            let upper = _mm512_srli_epi32::<16>(_mm512_castps_si512(v));
            let rounded = _mm512_srli_epi32::<16>(rounded_up(v));
            let quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let words = _mm512_mask_blend_epi32(nan, rounded, quiet);
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(words));
        }
    }
}

impl Lanes for Avx512Bf16 {
    common!();
    const DOT_IN_REGISTERS: bool = true;

    operations! {
        fn twice(self, v: __m512) -> (__m512, __m512) {
            let low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
            let high = _mm512_or_si512(low, _mm512_set1_epi32(8));
            (
                _mm512_permutexvar_ps(low, v),
                _mm512_permutexvar_ps(high, v),
            )
        }
        fn round_pairs(self, a: __m512, b: __m512) -> __m512 {
            std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(b, a))
        }
    }

    operations! {
        unsafe fn store_bf16(self, to: *mut Bf16, v: __m512) {
            let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v));
            _mm256_storeu_si256(to.cast(), rounded);
        }
    }

    arithmetic! {
        __m512;
        fn dot_pair(acc, a, b) {
            // SAFETY: both are 64 bytes of plain bits.
            let pairs = |v| std::mem::transmute::<__m512, __m512bh>(v);
            _mm512_dpbf16_ps(acc, pairs(a), pairs(b))
        };
    }
}

/// Bits whose upper halves are the numbers rounded to bfloat16 (nearest, ties to even); none is NaN.
///
/// # Safety
/// The processor has AVX-512.
#[inline(always)]
unsafe fn rounded_up(v: __m512) -> __m512i {
    // SAFETY: the caller vouches for AVX-512.
    unsafe {
        let bits = _mm512_castps_si512(v);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        _mm512_add_epi32(bits, bias)
    }
}

/// See [`Lanes::field`]: fields of 4 and 5 bits are looked up, which takes fewer instructions.
#[inline(always)]
unsafe fn field<const BITS: u32, const SIGNED: bool>(words: __m512i, at: u32) -> __m512 {
    // SAFETY: the caller has the proof that the processor has AVX-512.
    unsafe {
        let at_bottom = _mm512_srlv_epi32(words, _mm512_set1_epi32(at as i32));
        match (BITS, SIGNED) {
            (4, _) => _mm512_permutexvar_ps(at_bottom, Numbers::<BITS, SIGNED, 0>::load()),
            (5, _) => {
                let low = Numbers::<BITS, SIGNED, 0>::load();
                let high = Numbers::<BITS, SIGNED, 16>::load();
                _mm512_permutex2var_ps(low, at_bottom, high)
            }
            (_, false) => {
                let mask = _mm512_set1_epi32((1 << BITS) - 1);
                _mm512_cvtepi32_ps(_mm512_and_si512(at_bottom, mask))
            }
            (_, true) => {
                let left = _mm512_set1_epi32((32 - at - BITS) as i32);
                let right = _mm512_set1_epi32(32 - BITS as i32);
                _mm512_cvtepi32_ps(_mm512_srav_epi32(_mm512_sllv_epi32(words, left), right))
            }
        }
    }
}

/// The numbers that the fields `FIRST` to `FIRST + 15` are.
struct Numbers<const BITS: u32, const SIGNED: bool, const FIRST: i32>;

impl<const BITS: u32, const SIGNED: bool, const FIRST: i32> Numbers<BITS, SIGNED, FIRST> {
    const TABLE: [f32; 16] = {
        let mut table = [0.0; 16];
        let mut i = 0;
        while i < 16 {
            let field = FIRST + i as i32;
            let negative = SIGNED && field >= 1 << (BITS - 1);
            table[i] = (if negative { field - (1 << BITS) } else { field }) as f32;
            i += 1;
        }
        table
    };

    #[inline(always)]
    unsafe fn load() -> __m512 {
        // SAFETY: the table holds 16 numbers; the caller has the proof that the processor has AVX-512.
        unsafe { _mm512_loadu_ps(Self::TABLE.as_ptr()) }
    }
}

/// Transposes up to 16 words of 16 rows: four rounds of interleaving, 1, 2, 4 and 8 words wide.
#[inline(always)]
unsafe fn transpose_16(
    from: &[*const u32; 16],
    start: usize,
    count: usize,
    to: *mut u32,
    stride: usize,
) {
    let mask = (0xffff_u32 >> (16 - count)) as __mmask16;
    // SAFETY: the caller vouches for `count` words of each row and the rows of `to`.
    unsafe {
        let mut rows = [_mm512_setzero_ps(); 16];
        for (row, from) in rows.iter_mut().zip(from) {
            if !from.is_null() {
                *row = _mm512_maskz_loadu_ps(mask, from.add(start).cast());
            }
        }
        let ones = interleave(rows, 1, |a, b| (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        let twos = interleave(ones, 2, |a, b| {
            let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
            (_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)))
        });
        let fours = interleave(twos, 4, |a, b| {
            (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
        });
        let eights = interleave(fours, 8, |a, b| {
            (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
        });
        for w in 0..count {
            _mm512_storeu_ps(to.add(w * stride).cast(), eights[ORDER[w]]);
        }
    }
}

/// Where the rounds of `transpose_16` leave word w.
const ORDER: [usize; 16] = [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15];

/// Joins rows k and k + distance: their first halves stay at k, their second go to k + distance.
#[inline(always)]
fn interleave(
    mut rows: [__m512; 16],
    distance: usize,
    join: impl Fn(__m512, __m512) -> (__m512, __m512),
) -> [__m512; 16] {
    for block in (0..16).step_by(2 * distance) {
        for k in block..block + distance {
            (rows[k], rows[k + distance]) = join(rows[k], rows[k + distance]);
        }
    }
    rows
}
