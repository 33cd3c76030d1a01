//! What the tests that run sweeps share.

/// A case file of tiny cases, so that a sweep takes a second. `head` is what they all have beside
/// their shape; a case is the middle of its tables' names, its title, its operator, and what else it
/// has.
pub(crate) fn case_file(head: &str, cases: &[(&str, &str, &str, &str)]) -> String {
    let mut text = format!("family = \"tiny\"\nbatch = 2\nheads = 2\ndim = 16\n{head}\n");
    for (name, title, operator, rest) in cases {
        text += &format!(
            "\n[[case]]\ntable = \"tiny-{{metric}}-{{mode}}-{name}-{{dtype}}\"\ntitle = \"{title}\"\n\
             operator = {{ {operator} }}\n{rest}\n"
        );
    }
    text
}
