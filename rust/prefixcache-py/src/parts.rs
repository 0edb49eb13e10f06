//! Python classes that keep what they are made of.

/// A Python class of parts of a layer: each a keyword of its constructor, which may `check` them, and a field.
macro_rules! parts {
    (
        $(#[$doc:meta])*
        $name:ident $signature:tt { $($field:ident: $type:ty,)+ } $($check:ident)?
    ) => {
        $(#[$doc])*
        #[pyclass(frozen, module = "prefixcache._core")]
        pub struct $name {
            $($field: $type,)+
        }

        #[pymethods]
        impl $name {
            #[new]
            #[pyo3(signature = $signature)]
            fn new($($field: $type,)+) -> Result<Self> {
                let parts = Self { $($field,)+ };
                $(parts.$check()?;)?
                Ok(parts)
            }
        }
    };
}
pub(crate) use parts;
