# Modules that are never released, for what the root module must not require.
NESTED = internal/routertest

.PHONY: test generate

# All tests of all modules. PostgreSQL is started by the tests themselves.
test:
	go vet ./...
	go test -race -timeout 8m ./...
	@for module in $(NESTED); do echo "# $$module" && (cd $$module && go vet ./... && go test -race -timeout 8m ./...) || exit 1; done

# Everything that is generated and committed.
generate:
	go generate ./...
	go test ./generator ./generator/internal/policy -update
