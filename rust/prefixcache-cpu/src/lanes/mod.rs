//! One vector of `f32`, in each form.

/// Methods whose body needs nothing but the instructions themselves.
#[cfg(target_arch = "x86_64")]
macro_rules! arithmetic {
    ($vector:ty; $(fn $name:ident($($arg:ident),*) $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: $vector),*) -> $vector {
            // SAFETY: `self` proves that the processor has the instructions.
            unsafe { $body }
        }
    )*};
}

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
pub mod portable;

use crate::bf16::Bf16;

/// What codes of four bits stand for.
#[repr(C, align(64))]
pub struct CodeTable {
    numbers: [f32; 16],
    numbers_above: [f32; 16],
    /// The same as integers.
    pub codes: [i8; 16],
    /// The least of them, and what each is above it.
    pub least: i8,
    above: [u8; 16],
}

impl CodeTable {
    /// The table of these integers.
    pub const fn new(codes: [i8; 16]) -> Self {
        let (mut numbers, mut above) = ([0.0; 16], [0; 16]);
        let mut numbers_above = [0.0; 16];
        let (mut least, mut i) = (codes[0], 0);
        while i < 16 {
            least = if codes[i] < least { codes[i] } else { least };
            i += 1;
        }
        while i > 0 {
            i -= 1;
            numbers[i] = codes[i] as f32;
            above[i] = codes[i].abs_diff(least);
            numbers_above[i] = above[i] as f32;
        }
        Self { numbers, numbers_above, codes, least, above }
    }
}

/// The operations on one vector of a form.
///
/// A value of an implementing type is the proof that the processor has its instructions, so that
/// arithmetic is safe; loads and stores take raw pointers and are not.
///
/// A vector also carries 32-bit *words*: an `f32`, or two adjacent `bf16`.
pub trait Lanes: Copy + Send + Sync {
    /// The vector.
    type V: Copy;

    /// Lanes of a vector: 8 or 16.
    const LANES: usize;

    /// Vectors side by side in a register tile.
    const WIDTH: usize;

    /// Whether a product of words is one instruction, so that what was just made of blocks is best
    /// multiplied in registers.
    const DOT_IN_REGISTERS: bool = false;

    /// Whether shifts by constants are worth it that a compiler sees each number of a group on its own.
    const UNROLLED: bool = true;

    /// Whether quantized weights are best laid out with a column in each lane: where an `f32` product is
    /// as fast as any other, and shuffles are not free.
    const LANE_IS_COLUMN: bool = false;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;

    /// All lanes the word `w`.
    #[inline(always)]
    fn splat_word(self, w: u32) -> Self::V {
        self.splat(f32::from_bits(w))
    }

    /// Lane i holds the number i.
    fn iota(self) -> Self::V;

    /// Loads `LANES` words from any address.
    ///
    /// # Safety
    /// `from` is readable for `LANES * 4` bytes.
    unsafe fn load(self, from: *const f32) -> Self::V;

    /// Stores `LANES` words to any address.
    ///
    /// # Safety
    /// `to` is writable for `LANES * 4` bytes.
    unsafe fn store(self, to: *mut f32, v: Self::V);

    /// Loads `LANES` bfloat16 numbers.
    ///
    /// # Safety
    /// `from` is readable for `LANES * 2` bytes.
    unsafe fn load_bf16(self, from: *const Bf16) -> Self::V;

    /// Rounds to bfloat16 (nearest, ties to even) and stores.
    ///
    /// # Safety
    /// `to` is writable for `LANES * 2` bytes.
    unsafe fn store_bf16(self, to: *mut Bf16, v: Self::V);

    /// Loads `LANES` float16 numbers.
    ///
    /// # Safety
    /// `from` is readable for `LANES * 2` bytes.
    unsafe fn load_f16(self, from: *const u16) -> Self::V;

    /// Loads `LANES` bytes as the numbers 0 to 255.
    ///
    /// # Safety
    /// `from` is readable for `LANES` bytes.
    unsafe fn load_u8(self, from: *const u8) -> Self::V;

    /// Loads `LANES` bytes as the numbers -128 to 127.
    ///
    /// # Safety
    /// `from` is readable for `LANES` bytes.
    unsafe fn load_i8(self, from: *const i8) -> Self::V;

    /// Loads `LANES` exponents, none of them 255, as [`crate::f16::e8m0_to_f32`] does.
    ///
    /// # Safety
    /// `from` is readable for `LANES` bytes.
    #[inline(always)]
    unsafe fn load_e8m0(self, from: *const u8) -> Self::V {
        // With 1.5 * 2^23 an integer is in the lowest bits.
        let exponent = self.splat(12_582_912.0 - 127.0);
        // SAFETY: the caller's promise is the same.
        let exponent = self.add(unsafe { self.load_u8(from) }, exponent);
        let twice = self.max(self.pow2(exponent), self.splat_word(0x0040_0000));
        self.mul(twice, self.splat(0.5))
    }

    /// The same vector, in a register here: between two of these a compiler that runs out of registers
    /// keeps others in memory. A chain of additions must not pass through memory at each step.
    #[inline(always)]
    fn in_register(self, v: Self::V) -> Self::V {
        v
    }

    /// The numbers that `BITS` (2 to 6, or 8) bits of each word are, from bit `at` on; `at + BITS` is at most 32.
    fn field<const BITS: u32, const SIGNED: bool>(self, words: Self::V, at: u32) -> Self::V;

    /// sums + x * (fields * scales + offsets) for four vectors, where the inner sums and the outer ones are rounded
    /// once each. The fields are those of `words` from bit `at` on, unsigned and times 2^at; `at + BITS` is below 32.
    /// With [`Self::LANE_IS_COLUMN`] alone.
    fn add_fields<const BITS: u32>(
        self,
        _sums: [Self::V; 4],
        _words: [Self::V; 4],
        _at: u32,
        _scales: &[Self::V; 4],
        _offsets: [Self::V; 4],
        _x: &f32,
    ) -> [Self::V; 4] {
        unreachable!("a lane is no column")
    }

    /// What the table has for four bits of each word, from bit `at` on, a multiple of four; with
    /// [`Self::LANE_IS_COLUMN`] what that is above the table's least number.
    fn lookup(self, table: &CodeTable, words: Self::V, at: u32) -> Self::V;

    /// Words of which the low bits are those of `low` from bit `at` (1 to 31) on, and the others of `high`.
    fn join(self, low: Self::V, high: Self::V, at: u32) -> Self::V;

    /// The lower half of the lanes, each twice, then the upper half so. Without [`Self::LANE_IS_COLUMN`] alone.
    fn twice(self, _v: Self::V) -> (Self::V, Self::V) {
        unreachable!("a lane is a column")
    }

    /// The numbers of `a` and then of `b`, rounded to bfloat16 (nearest, ties to even), two to a word.
    /// None of them is NaN or subnormal. Without [`Self::LANE_IS_COLUMN`] alone.
    fn round_pairs(self, _a: Self::V, _b: Self::V) -> Self::V {
        unreachable!("a lane is a column")
    }

    /// Words of two: each number of `even`, rounded to bfloat16 (nearest, ties to even), below that of
    /// `odd`. None of them is NaN. With [`Self::LANE_IS_COLUMN`] alone.
    fn zip_rounded(self, _even: Self::V, _odd: Self::V) -> Self::V {
        unreachable!("a lane is no column")
    }

    /// The lanes of `a` and then of `b`: those of even number, and those of odd. In plain Rust alone: other forms lay
    /// `f32` out with a column in each lane.
    fn unzip(self, _a: Self::V, _b: Self::V) -> (Self::V, Self::V) {
        unreachable!("a lane is a column")
    }

    /// a + b
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// a - b
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// a * b
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// a / b
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// a > b ? a : b; hence b where one is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// a < b ? a : b; hence b where one is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// a * b + c; rounded once where the form has a fused instruction.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// acc + a.0 * b.0 + a.1 * b.1 over words of two bfloat16 numbers.
    fn dot_pair(self, acc: Self::V, a: Self::V, b: Self::V) -> Self::V;
    /// a < b ? yes : no
    fn select_less(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// 2^n, where n is an integer in -126..=127 held in the low mantissa bits.
    fn pow2(self, n: Self::V) -> Self::V;

    /// Words of two: the upper halves of `even` below the upper halves of `odd`, which are zero
    /// otherwise.
    fn zip_upper(self, even: Self::V, odd: Self::V) -> Self::V;

    /// The highest lane, in every lane. Nothing is said of NaN.
    fn highest(self, v: Self::V) -> Self::V;

    /// The sum of the lanes, in the order of halves: lane i to lane i + LANES / 2, and so on.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let mut lanes = [0.0_f32; 16];
        // SAFETY: the array holds 16 numbers, and no form has more lanes.
        unsafe { self.store(lanes.as_mut_ptr(), v) };
        let mut half = Self::LANES / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
            half /= 2;
        }
        lanes[0]
    }

    /// Transposes a block of words: `to[w * to_stride + k] = from[k][w]`, for k below 16 and w
    /// below `words`. A null row counts as zeros.
    ///
    /// # Safety
    /// Each row that is not null is readable for `words` words, and `to` is writable for 16 words
    /// at each of `words` multiples of `to_stride`.
    #[inline(always)]
    unsafe fn transpose(self, from: &[*const u32; 16], words: usize, to: *mut u32, stride: usize) {
        for (k, &row) in from.iter().enumerate() {
            for w in 0..words {
                // SAFETY: inside the row and the block that the caller vouches for.
                unsafe {
                    let word = if row.is_null() { 0 } else { row.add(w).read_unaligned() };
                    to.add(w * stride + k).write_unaligned(word);
                }
            }
        }
    }

    /// e^x, to about 1 unit in the last place; 0 below -87.33, at most e^88, NaN stays NaN, and
    /// e^0 is 1.
    ///
    /// Range reduction and a polynomial of degree 6, as Cephes' expf does; the same instructions
    /// on every lane.
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer
        const LN2_HI: f32 = 0.693_359_4;
        const LN2_LO: f32 = -2.121_944_4e-4;
        const POLYNOMIAL: [f32; 6] =
            [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
        let lowest = self.splat(-87.33);
        let clamped = self.max(lowest, self.min(self.splat(88.0), x));
        let n = self.mul_add(clamped, self.splat(std::f32::consts::LOG2_E), self.splat(ROUND));
        let whole = self.sub(n, self.splat(ROUND));
        let r = self.mul_add(whole, self.splat(-LN2_HI), clamped);
        let r = self.mul_add(whole, self.splat(-LN2_LO), r);
        let mut p = self.splat(POLYNOMIAL[0]);
        for c in &POLYNOMIAL[1..] {
            p = self.mul_add(p, r, self.splat(*c));
        }
        let p = self.add(self.mul_add(p, self.mul(r, r), r), self.splat(1.0));
        let y = self.mul(p, self.pow2(n));
        self.select_less(x, lowest, self.splat(0.0), y)
    }

    /// x / (1 + e^-t)
    #[inline(always)]
    fn times_sigmoid(self, x: Self::V, minus_t: Self::V) -> Self::V {
        self.div(x, self.add(self.splat(1.0), self.exp(minus_t)))
    }

    /// tanh(x) as 1 - 2 / (e^2x + 1).
    #[inline(always)]
    fn tanh(self, x: Self::V) -> Self::V {
        let one = self.splat(1.0);
        let e = self.exp(self.add(x, x));
        self.sub(one, self.div(self.splat(2.0), self.add(e, one)))
    }
}

/// Starts of the vectors of `width` numbers, and how many numbers each really has.
#[inline(always)]
pub fn vectors<L: Lanes>(width: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..width).step_by(L::LANES).map(move |at| (at, (width - at).min(L::LANES)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::form::{Form, Kernel};

    struct Exp<'a>(&'a mut [f32]);

    impl Kernel for Exp<'_> {
        type Output = ();
        fn run<L: Lanes>(self, lanes: L) {
            for block in self.0.chunks_exact_mut(L::LANES) {
                // SAFETY: a chunk holds LANES numbers.
                unsafe { lanes.store(block.as_mut_ptr(), lanes.exp(lanes.load(block.as_ptr()))) }
            }
        }
    }

    fn exp(form: Form, values: &[f32]) -> Vec<f32> {
        let mut padded = values.to_vec();
        padded.resize(values.len().next_multiple_of(16), 0.0);
        form.run(Exp(&mut padded));
        padded.truncate(values.len());
        padded
    }

    #[test]
    fn exp_is_exact_to_two_ulp() {
        let inputs: Vec<f32> = (-87_000..88_000).map(|i| i as f32 / 1000.0).collect();
        for form in Form::available() {
            for (x, y) in inputs.iter().zip(exp(form, &inputs)) {
                let want = f64::from(*x).exp();
                let error = ((f64::from(y) - want) / want).abs();
                assert!(error < 2.5e-7, "{form:?}: e^{x} = {y}, want {want}");
            }
        }
    }

    #[test]
    fn exp_at_the_edges() {
        let edges = [0.0, -0.0, f32::NEG_INFINITY, -100.0, f32::INFINITY, f32::NAN];
        for form in Form::available() {
            let got = exp(form, &edges);
            assert_eq!(&got[..4], &[1.0, 1.0, 0.0, 0.0], "{form:?}");
            assert!(got[4] > 1e38 && got[5].is_nan(), "{form:?}: {got:?}");
        }
    }

    #[test]
    fn exp_does_not_depend_on_the_lane() {
        let inputs: Vec<f32> = (0..160).map(|i| (i as f32 * 0.37).sin() * 40.0).collect();
        for form in Form::available() {
            let all = exp(form, &inputs);
            for i in 0..inputs.len() {
                assert_eq!(exp(form, &inputs[i..i + 1])[0].to_bits(), all[i].to_bits());
            }
        }
    }

    struct AddFields;

    impl Kernel for AddFields {
        type Output = Option<[f32; 4]>;
        fn run<L: Lanes>(self, lanes: L) -> Option<[f32; 4]> {
            if !L::LANE_IS_COLUMN {
                return None;
            }
            let each = [1.0, 2.0, 3.0, 4.0].map(|x| lanes.splat(x));
            let words = [0x0550_u32, 0x0660, 0x0990, 0x0ff0].map(|word| lanes.splat_word(word));
            let scales = each.map(|v| lanes.mul(v, lanes.splat(1.0 / 16.0)));
            let sums = lanes.add_fields::<4>(each, words, 4, &scales, each, &2.0);
            let mut first = [0.0; 16];
            Some(sums.map(|v| {
                // SAFETY: the array holds 16 numbers, at least LANES.
                unsafe { lanes.store(first.as_mut_ptr(), v) };
                first[0]
            }))
        }
    }

    #[test]
    fn fields_are_added_where_they_are() {
        for form in Form::available() {
            // i + 2 * (field * i + i)
            let want = [13.0, 30.0, 63.0, 132.0];
            assert!(form.run(AddFields).is_none_or(|sums| sums == want), "{form:?}");
        }
    }

    struct Folds([f32; 16]);

    impl Kernel for Folds {
        type Output = (f32, [f32; 16]);
        fn run<L: Lanes>(self, lanes: L) -> Self::Output {
            let mut highest = [f32::NEG_INFINITY; 16];
            // SAFETY: both arrays hold 16 numbers, at least LANES.
            unsafe {
                let v = lanes.load(self.0.as_ptr());
                lanes.store(highest.as_mut_ptr(), lanes.highest(v));
                (lanes.sum(v), highest)
            }
        }
    }

    #[test]
    fn folds_take_every_lane() {
        for form in Form::available() {
            let lanes = if form.name().starts_with("avx512") { 16 } else { 8 };
            for place in 0..lanes {
                let mut numbers = [-1.0; 16];
                numbers[place] = 7.0;
                let (sum, highest) = form.run(Folds(numbers));
                assert_eq!(sum, 8.0 - lanes as f32, "{form:?}");
                assert_eq!(highest[..lanes], [7.0; 16][..lanes], "{form:?}: lane {place}");
            }
        }
    }

    struct Transpose<'a>(&'a [u32], usize, &'a mut [u32]);

    impl Kernel for Transpose<'_> {
        type Output = ();
        fn run<L: Lanes>(self, lanes: L) {
            let Self(from, words, to) = self;
            let rows: [*const u32; 16] = std::array::from_fn(|k| match k {
                13.. => std::ptr::null(),
                _ => from[k * words..].as_ptr(),
            });
            // SAFETY: `from` holds 13 rows of `words` words, `to` `words` rows of 16 words.
            unsafe { lanes.transpose(&rows, words, to.as_mut_ptr(), 16) }
        }
    }

    #[test]
    fn transpose_of_every_width() {
        for form in Form::available() {
            for words in 1..40 {
                let from: Vec<u32> = (1..=13 * words as u32).collect();
                let mut to = vec![u32::MAX; 16 * words];
                form.run(Transpose(&from, words, &mut to));
                for (i, &word) in to.iter().enumerate() {
                    let (w, k) = (i / 16, i % 16);
                    let want = if k < 13 { from[k * words + w] } else { 0 };
                    assert_eq!(word, want, "{form:?}: word {w} of row {k} of {words} words");
                }
            }
        }
    }
}
