"""For people who write documents: drafts, explanations, schemas, migration, differences."""
