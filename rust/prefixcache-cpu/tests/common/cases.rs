//! How many cases the properties of several crates draw.

use proptest::prelude::ProptestConfig;
use proptest::test_runner::FileFailurePersistence;

/// PROPTEST_CASES asks for more. A failing case is kept next to its test, and drawn first from then on.
pub fn cases(usual: u32) -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok();
    ProptestConfig {
        cases: asked.and_then(|cases| cases.parse().ok()).unwrap_or(usual),
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    }
}
