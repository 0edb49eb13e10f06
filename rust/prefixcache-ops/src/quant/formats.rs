//! Formats as types, so that a kernel is compiled for each.

use super::blocks::Format;

/// A format that the compiler knows.
pub trait OfFormat: Send + Sync {
    /// Which one it is.
    const FORMAT: Format;
}

macro_rules! formats {
    ($($name:ident)*) => {$(
        pub struct $name;

        impl OfFormat for $name {
            const FORMAT: Format = Format::$name;
        }
    )*};
}

formats! { Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4K Q5K Q6K Q2K Q3K IQ4NL IQ4XS MXFP4 }

/// Evaluates an expression with `$type` as the type of a format.
macro_rules! with_format {
    ($format:expr, $type:ident => $body:expr) => {
        $crate::quant::formats::with_format!($format, $type, $body,
            Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4K Q5K Q6K Q2K Q3K IQ4NL IQ4XS MXFP4)
    };
    ($format:expr, $type:ident, $body:expr, $($name:ident)*) => {
        match $format {
            $($crate::quant::blocks::Format::$name => {
                type $type = $crate::quant::formats::$name;
                $body
            })*
        }
    };
}
pub(crate) use with_format;
