# Modules that are never released, for what the root module must not require.
NESTED = internal/routertest internal/chaos internal/bench examples/integrations

.PHONY: test generate lint chaos documents newest pgbouncer bench

# All tests of all modules. PostgreSQL is started by the tests themselves.
test:
	go vet ./...
	go test -race -timeout 8m ./...
	@# What is allocated differs under the race detector.
	go test -timeout 8m -run 'TestAllocations|TestLargeBodiesAreHeldOnce' ./runtime/idempotency
	@for module in $(NESTED); do echo "# $$module" && (cd $$module && go vet ./... && go test -race -timeout 8m ./...) || exit 1; done

# All faults, in their long form: minutes, bounded, each with its count.
chaos:
	go test -v -count=1 -timeout 30m ./internal/faulttest -faults.long
	cd internal/chaos && go test -v -count=1 -race -timeout 15m -run 'TestHistories$$' . -chaos.duration=5m

# Generates, compiles and vets every published document in testdata/specs.
documents:
	go test -timeout 8m -run 'Document|NoWorseThanStock' ./generator

# The generator and the command with the newest kin-openapi, which a user's
# module may require. go.mod keeps the floor. The published documents are left
# to make documents.
NEWEST_KIN = github.com/getkin/kin-openapi/openapi3@v0.153.0

newest:
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && cp go.mod go.sum "$$dir" && \
	go get -modfile="$$dir/go.mod" $(NEWEST_KIN) && \
	go test -modfile="$$dir/go.mod" -timeout 8m -skip '^TestDocument' ./generator/... ./cmd/...

# The store behind PgBouncer, which must be installed.
pgbouncer:
	go test -race -count=1 -tags pgbouncer -run PgBouncer ./runtime/sqlstore

# This module beside a floor and beside its peers, some ten minutes on a machine
# that should do nothing else. Needs pgbench. BENCH="-run HTTP" measures less.
bench:
	cd internal/bench && go run . $(BENCH)

# Everything that is generated and committed.
generate:
	go generate ./...
	cd internal/bench && go generate ./...
	cd examples/integrations && go generate ./...
	go test ./generator -update

# The version is pinned here, outside go.mod, so that no user inherits it.
STATICCHECK = go run honnef.co/go/tools/cmd/staticcheck@v0.8.2

lint:
	@unformatted=$$(gofmt -l cmd generator runtime internal examples templates | grep -v /want/); test -z "$$unformatted" || (echo "gofmt: $$unformatted" && exit 1)
	go vet ./...
	$(STATICCHECK) ./cmd/... ./generator/... ./runtime/... ./internal/... ./templates/...
	@# What is generated keeps oapi-codegen's own error texts, which begin with capitals.
	$(STATICCHECK) -checks inherit,-ST1005 ./examples/... ./testdata/golden/...
	@for module in $(NESTED); do (cd $$module && go vet ./... && $(STATICCHECK) -checks inherit,-ST1005 ./...) || exit 1; done
