//! Dot products of bytes, in the forms that processors have for them.
//!
//! Integer sums are exact in any order, and every floating-point operation here rounds once, so a
//! kernel over [`ByteLanes`] gives the same bits in every form, as long as it fixes the order of its
//! additions in `f32`.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use std::fmt;

use crate::form::Form;
use portable::Portable;

#[cfg(target_arch = "x86_64")]
use self::{avx2::Avx2, avx512::Avx512Vnni};

/// The operations on vectors of 32-bit lanes, each of which may stand for four bytes.
///
/// A value of an implementing type is the proof that the processor has its instructions.
pub trait ByteLanes: Copy + Send + Sync {
    /// A vector of `i32`, or of four bytes in each lane.
    type I: Copy;
    /// A vector of `f32`.
    type F: Copy;

    /// Lanes of a vector: 8 or 16.
    const LANES: usize;

    /// Whether a dot product of bytes is one instruction. Without it [`Self::pairs`] are the faster way: their
    /// sums stay in 16 bits for as long as they fit.
    const DOT_OF_FOUR: bool;

    /// All lanes `x`.
    fn splat(self, x: i32) -> Self::I;

    /// All lanes `x`.
    fn splat_f32(self, x: f32) -> Self::F;

    /// Loads `LANES * 4` bytes from any address.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load(self, from: *const u8) -> Self::I;

    /// Loads `LANES` unsigned bytes, one a lane.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load_u8(self, from: *const u8) -> Self::I;

    /// Loads `LANES` signed bytes, one a lane.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load_i8(self, from: *const u8) -> Self::I;

    /// Loads `LANES` numbers of IEEE's half precision; exact.
    ///
    /// # Safety
    /// `LANES * 2` bytes are readable.
    unsafe fn load_f16(self, from: *const u8) -> Self::F;

    /// Loads `LANES` exponents, none of them 255, as [`crate::f16::e8m0_to_f32`] does.
    ///
    /// # Safety
    /// `LANES` bytes are readable.
    unsafe fn load_e8m0(self, from: *const u8) -> Self::F;

    /// Loads `LANES` numbers from any address.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load_f32(self, from: *const f32) -> Self::F;

    /// Stores `LANES` numbers to any address.
    ///
    /// # Safety
    /// They are writable.
    unsafe fn store(self, to: *mut f32, v: Self::F);

    /// a + b, modulo 2^32.
    fn add(self, a: Self::I, b: Self::I) -> Self::I;
    /// a - b, modulo 2^32.
    fn sub(self, a: Self::I, b: Self::I) -> Self::I;
    /// The lower 32 bits of a * b.
    fn mul(self, a: Self::I, b: Self::I) -> Self::I;
    /// a & b
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    /// a | b
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// For each byte, at most 15, what the table has for it.
    fn lookup(self, table: &[u8; 16], bytes: Self::I) -> Self::I;
    /// Each lane's 32 bits moved up by `N`.
    fn shift_up<const N: u32>(self, a: Self::I) -> Self::I;
    /// Each lane's 32 bits moved down by `N`, zeros first.
    fn shift_down<const N: u32>(self, a: Self::I) -> Self::I;

    /// acc + the products of four unsigned bytes and four signed ones of `x`. With [`Self::DOT_OF_FOUR`] alone.
    fn dot(self, _acc: Self::I, _bytes: Self::I, _x: Self::I) -> Self::I {
        unreachable!("the form has pairs")
    }

    /// The products of four unsigned bytes of `codes`, at most 128, and four signed ones of `x`, above -128: two sums
    /// a lane, of 16 bits. This and the next four are for forms without [`Self::DOT_OF_FOUR`].
    fn pairs(self, _codes: Self::I, _x: Self::I) -> Self::I {
        unreachable!("a dot product of bytes is one instruction")
    }
    /// Unsigned bytes less 128, as signed ones.
    fn less_128(self, bytes: Self::I) -> Self::I {
        self.pairs(bytes, bytes)
    }
    /// The magnitudes of signed bytes, unsigned: up to 128.
    fn magnitudes(self, bytes: Self::I) -> Self::I {
        self.pairs(bytes, bytes)
    }
    /// The bytes of `x`, above -128, times the signs of those of `signs`.
    fn with_signs(self, x: Self::I, signs: Self::I) -> Self::I {
        self.pairs(signs, x)
    }
    /// a + b, half by half of the lanes, modulo 2^16.
    fn add_pairs(self, a: Self::I, b: Self::I) -> Self::I {
        self.pairs(a, b)
    }
    /// The lower halves of the lanes of `low`, and above them those of `high`.
    fn pair(self, low: Self::I, high: Self::I) -> Self::I;
    /// The products of both signed halves of the lanes, added.
    fn dot_pairs(self, a: Self::I, b: Self::I) -> Self::I;

    /// Rounds to the nearest number, ties to even.
    fn to_f32(self, a: Self::I) -> Self::F;
    /// a * b
    fn mul_f32(self, a: Self::F, b: Self::F) -> Self::F;
    /// a * b + c, rounded once in every form.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
}

/// A computation written once over [`ByteLanes`]. [`ByteForm::run`] compiles it for each form.
///
/// Everything `run` calls must be `#[inline(always)]`, as in [`crate::Kernel`].
pub trait ByteKernel {
    /// What the computation returns.
    type Output;

    /// Computes with vectors of the type `L`.
    fn run<L: ByteLanes>(self, lanes: L) -> Self::Output;
}

/// A set of instructions for dot products of bytes; a value is the proof that the processor has them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ByteForm(Kind);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Portable(Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2<false>),
    #[cfg(target_arch = "x86_64")]
    AvxVnni(Avx2<true>),
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(Avx512Vnni),
}

impl ByteForm {
    /// The fastest form whose vectors are no wider than those of `form`.
    pub fn of(form: Form) -> Self {
        match form.name() {
            #[cfg(target_arch = "x86_64")]
            name if name != "portable" => Self::widest(name != "avx2"),
            _ => Self(Kind::Portable(Portable)),
        }
    }

    /// The fastest form, where the processor has AVX2 at least; without `wide` of 256 bits at most.
    #[cfg(target_arch = "x86_64")]
    fn widest(wide: bool) -> Self {
        let found = Avx512Vnni::detect().filter(|_| wide).map(Kind::Avx512Vnni);
        let found = found.or_else(|| Avx2::detect_vnni().map(Kind::AvxVnni));
        let found = found.or_else(|| Avx2::detect().map(Kind::Avx2));
        Self(found.unwrap_or(Kind::Portable(Portable)))
    }

    /// Every form that this processor has, the slowest first.
    pub fn available() -> Vec<Self> {
        let kinds = [
            Some(Kind::Portable(Portable)),
            #[cfg(target_arch = "x86_64")]
            Avx2::detect().map(Kind::Avx2),
            #[cfg(target_arch = "x86_64")]
            Avx2::detect_vnni().map(Kind::AvxVnni),
            #[cfg(target_arch = "x86_64")]
            Avx512Vnni::detect().map(Kind::Avx512Vnni),
        ];
        kinds.into_iter().flatten().map(Self).collect()
    }

    /// Name of the form: `portable`, `avx2`, `avx_vnni` or `avx512_vnni`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::AvxVnni(_) => "avx_vnni",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni(_) => "avx512_vnni",
        }
    }

    /// Runs the kernel with this form's instructions.
    #[inline]
    pub fn run<K: ByteKernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Kind::Portable(lanes) => kernel.run(lanes),
            // SAFETY: `lanes` exists only where the processor has the features named below.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(lanes) => unsafe { kernel.with_avx2(lanes) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Kind::AvxVnni(lanes) => unsafe { kernel.with_avx_vnni(lanes) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni(lanes) => unsafe { kernel.with_avx512_vnni(lanes) },
        }
    }
}

/// A kernel compiled for each form, in methods for the reason of the forms of [`Kernel`](crate::Kernel).
///
/// # Safety
/// Of each method: the processor has the form's instructions, which its lanes prove.
#[cfg(target_arch = "x86_64")]
trait InForm: ByteKernel + Sized {
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn with_avx2(self, lanes: Avx2<false>) -> Self::Output {
        self.run(lanes)
    }

    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    unsafe fn with_avx_vnni(self, lanes: Avx2<true>) -> Self::Output {
        self.run(lanes)
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn with_avx512_vnni(self, lanes: Avx512Vnni) -> Self::Output {
        self.run(lanes)
    }
}

#[cfg(target_arch = "x86_64")]
impl<K: ByteKernel> InForm for K {}

impl fmt::Debug for ByteForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
