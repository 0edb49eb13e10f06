//! The forms of the kernels, one per set of instructions, and their choice at run time.

use std::fmt;
use std::str::FromStr;

use crate::lanes::{Lanes, portable::Portable};

#[cfg(target_arch = "x86_64")]
use crate::lanes::{avx2::Avx2, avx512::Avx512, avx512::Avx512Bf16};

/// A set of instructions that a kernel is compiled for.
///
/// A value of this type is a proof that the processor has them: the only ways to make one are
/// [`Form::detect`], [`Form::available`] and parsing its name, and they ask the processor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Form(Kind);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Portable(Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(Avx512Bf16),
}

/// A computation written once over [`Lanes`]. [`Form::run`] compiles it for each form.
///
/// Everything `run` calls must be `#[inline(always)]`, or it is compiled without the form's
/// instructions: correct, but slow.
pub trait Kernel {
    /// What the computation returns.
    type Output;

    /// Whether it has numbers of bfloat16. Without them `avx512_bf16` computes what `avx512` does, and is
    /// not compiled.
    const HAS_BF16: bool = true;

    /// Computes with vectors of type `L`.
    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

impl Form {
    /// The fastest form that this processor has.
    pub fn detect() -> Self {
        *Self::available().last().expect("the portable form is always there")
    }

    /// Every form that this processor has, the slowest first.
    pub fn available() -> Vec<Self> {
        #[cfg(not(target_arch = "x86_64"))]
        let kinds = [Some(Kind::Portable(Portable))];
        #[cfg(target_arch = "x86_64")]
        let kinds = {
            let plain = Avx512::detect().map(Kind::Avx512);
            let pairs = Avx512Bf16::detect().map(Kind::Avx512Bf16);
            let [slower, faster] =
                if Avx512Bf16::is_fast() { [plain, pairs] } else { [pairs, plain] };
            [Some(Kind::Portable(Portable)), Avx2::detect().map(Kind::Avx2), slower, faster]
        };
        kinds.into_iter().flatten().map(Self).collect()
    }

    /// Name of the form: `portable`, `avx2`, `avx512` or `avx512_bf16`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(_) => "avx512_bf16",
        }
    }

    /// Whether a product of words is one instruction: see [`Lanes::DOT_IN_REGISTERS`].
    pub fn dots_in_registers(self) -> bool {
        struct Asked;
        impl Kernel for Asked {
            type Output = bool;
            fn run<L: Lanes>(self, _: L) -> bool {
                L::DOT_IN_REGISTERS
            }
        }
        self.run(Asked)
    }

    /// The form to round results with where they are to be the same bits in every form: the instruction
    /// that rounds to bfloat16 takes what is smaller than a normal number for 0.
    pub fn keeping_denormals(self) -> Self {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(lanes) => Self(Kind::Avx512(lanes.without_bf16())),
            _ => self,
        }
    }

    /// Runs the kernel with this form's instructions.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Kind::Portable(lanes) => kernel.run(lanes),
            // SAFETY: `lanes` exists only where the processor has the features named below.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(lanes) => unsafe { kernel.with_avx2(lanes) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(lanes) => unsafe { kernel.with_avx512(lanes) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(lanes) => unsafe {
                if K::HAS_BF16 {
                    kernel.with_avx512_bf16(lanes)
                } else {
                    kernel.with_avx512(lanes.without_bf16())
                }
            },
        }
    }
}

/// A kernel compiled for each form. The compiler puts a type's methods into the unit of the type's module, so that
/// several threads compile the kernels; functions of this module would all be one thread's.
///
/// # Safety
/// Of each method: the processor has the form's instructions, which its lanes prove.
#[cfg(target_arch = "x86_64")]
trait InForm: Kernel + Sized {
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn with_avx2(self, lanes: Avx2) -> Self::Output {
        self.run(lanes)
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn with_avx512(self, lanes: Avx512) -> Self::Output {
        self.run(lanes)
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn with_avx512_bf16(self, lanes: Avx512Bf16) -> Self::Output {
        self.run(lanes)
    }
}

#[cfg(target_arch = "x86_64")]
impl<K: Kernel> InForm for K {}

impl fmt::Debug for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The processor has no form of this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this processor has no form {0:?}; it has {available:?}", available = Form::available())]
pub struct UnknownForm(String);

impl FromStr for Form {
    type Err = UnknownForm;

    fn from_str(name: &str) -> Result<Self, UnknownForm> {
        let found = Self::available().into_iter().find(|form| form.name() == name);
        found.ok_or_else(|| UnknownForm(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_form() {
        for form in Form::available() {
            assert_eq!(form.name().parse(), Ok(form));
        }
        assert!("sse9".parse::<Form>().is_err());
    }

    #[test]
    fn the_best_form_is_the_last() {
        assert_eq!(Form::available().last(), Some(&Form::detect()));
    }
}
