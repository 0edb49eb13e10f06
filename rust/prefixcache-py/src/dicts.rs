//! Python dicts of what a value has.

/// Sets fields of a value in a dict, under their own names or those given.
macro_rules! set_fields {
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $name:literal) => { $name };
    ($dict:expr, $of:expr; $($field:ident $(as $name:literal)?),+ $(,)?) => {
        $($dict.set_item(set_fields!(@name $field $($name)?), &$of.$field)?;)+
    };
}
pub(crate) use set_fields;
