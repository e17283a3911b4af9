"""Plans with what backends say of them: rules, sizes, budgets."""
